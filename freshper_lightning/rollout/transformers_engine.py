"""The rollout engine without vLLM: batched sampling from a Hugging Face model with a KV cache."""

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from typing_extensions import override

from freshper_lightning.rollout.attention import GROUPED_SDPA, caps_attention
from freshper_lightning.rollout.checkpoint import WeightNames, stop_token_ids
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.kv_cache import ConversationCache, KVRows, RowRef, Tokens
from freshper_lightning.rollout.requests import EngineState, check_request
from freshper_lightning.rollout.sampling import Truncation
from freshper_lightning.rollout.token_sampler import SampledTokens


class TransformersEngine(RolloutEngine):
    """Plays queued requests in batches; a sample is a function of weights, prompt, temperature and seed alone.

    A conversation that goes on where an earlier reply ended costs its new tokens only, since keys and values are kept
    until weights change, within ``kv_cache_mib``. Batch mates change log-probabilities by rounding, never the uniforms
    that tokens are drawn with.

    Raises:
        ValueError: The checkpoint names no stop token.
    """

    name = "transformers"

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        max_model_len: int = 1024,
        max_batch_size: int = 64,
        device: str | torch.device = "cpu",
        kv_cache_mib: int = 256,
        truncation: Truncation | None = None,
    ) -> None:
        device = torch.device(device)
        attention = GROUPED_SDPA if device.type == "cpu" else "sdpa"
        if caps_attention(AutoConfig.from_pretrained(model_path)):
            attention = "eager"
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        self._model = model.eval().requires_grad_(False).to(device)
        self._device = device
        self._names = WeightNames(self._model)
        self._max_model_len = max_model_len
        self._max_batch_size = max_batch_size
        self._is_stop = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool, device=device)
        self._is_stop[list(stop_token_ids(model_path))] = True
        self._truncation = truncation or Truncation()
        self._conversations = ConversationCache(kv_cache_mib << 20 if _attends_to_everything(model.config) else 0)
        self._queue: deque[GenerationRequest] = deque()
        self._version = -1
        self._state = EngineState(self.name)

    @override
    def submit(self, request: GenerationRequest) -> None:
        self._state.require_ready()
        check_request(request, self._max_model_len, {queued.request_id for queued in self._queue})
        self._queue.append(request)

    @torch.inference_mode()
    def poll(self, wait: bool = True) -> list[Completion]:
        """Play one batch to its end, which is this engine's step; see :meth:`RolloutEngine.poll`."""
        self._state.require_ready()
        if not self._queue:
            return []
        requests, refs = self._next_batch()
        prompts = [np.asarray(request.prompt_token_ids, dtype=np.int64) for request in requests]
        past = self._conversations.take(refs) if refs else None
        sampled = SampledTokens(requests, prompts, self._is_stop, self._truncation)
        rows = self._play(prompts, past, sampled)
        if rows is not None:
            self._conversations.put(rows)
        return sampled.completions(self._version)

    def _next_batch(self) -> tuple[list[GenerationRequest], list[RowRef]]:
        """The oldest request and those that can share its batch: all of them go on from known rows, or none does."""
        batch: list[tuple[GenerationRequest, RowRef | None]] = []
        rest: list[GenerationRequest] = []
        while self._queue and len(batch) < self._max_batch_size:
            request = self._queue.popleft()
            ref = self._conversations.find(np.asarray(request.prompt_token_ids, dtype=np.int64))
            if batch and (ref is None) != (batch[0][1] is None):
                rest.append(request)
            else:
                batch.append((request, ref))
        self._queue.extendleft(reversed(rest))
        batch.sort(key=lambda entry: -1 if entry[1] is None else entry[1].block)
        return [request for request, _ in batch], [ref for _, ref in batch if ref is not None]

    def _play(self, prompts: Sequence[Tokens], past: KVRows | None, sampled: SampledTokens) -> KVRows | None:
        """Sample every reply to its end and return the attention states of the conversations."""
        logits, cache, mask = self._prefill(prompts, past)
        positions = mask.sum(1, keepdim=True)
        while sampled.step(logits):
            active = sampled.active[:, None]
            mask = torch.cat([mask, active], dim=1)
            logits = self._forward(sampled.last_tokens[:, None], mask, positions, cache)
            positions = positions + 1
        if self._conversations.max_bytes == 0:
            return None
        return KVRows.read(cache, mask, sampled.seen_tokens(prompts))

    def _prefill(self, prompts: Sequence[Tokens], past: KVRows | None) -> tuple[Tensor, DynamicCache, Tensor]:
        """Logits [B, V] after each prompt, the cache, and its mask bool [B, W]."""
        if past is None:
            return self._prefill_from_scratch(prompts)
        news = [prompt[len(tokens) :] for prompt, tokens in zip(prompts, past.tokens, strict=True)]
        ids, new_mask = self._left_pad(news)
        mask = torch.cat([past.mask, new_mask], dim=1)
        cache = past.dynamic_cache()
        return self._forward(ids, mask, _positions(mask)[:, -ids.shape[1] :], cache), cache, mask

    def _prefill_from_scratch(self, prompts: Sequence[Tokens]) -> tuple[Tensor, DynamicCache, Tensor]:
        """Equal prompts, such as those of a group's first turn, are computed once."""
        distinct = {prompt.tobytes(): prompt for prompt in prompts}
        order = {key: row for row, key in enumerate(distinct)}
        rows = torch.tensor([order[prompt.tobytes()] for prompt in prompts], device=self._device)
        ids, mask = self._left_pad(list(distinct.values()))
        cache = DynamicCache(config=self._model.config)
        logits = self._forward(ids, mask, _positions(mask), cache)
        if len(distinct) < len(prompts):
            cache.batch_select_indices(rows)
            logits, mask = logits[rows], mask[rows]
        return logits, cache, mask

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _left_pad(self, sequences: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        width = max(len(sequence) for sequence in sequences)
        ids = np.zeros((len(sequences), width), dtype=np.int64)
        mask = np.zeros((len(sequences), width), dtype=bool)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = sequence
            mask[row, width - len(sequence) :] = True
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device)

    @torch.no_grad()
    @override
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._state.loading(len(self._queue)):
            self._conversations.clear()
            for name, tensor in self._names.checked(named_tensors):
                self._names.parameters[name].copy_(tensor)
            self._version = version

    @property
    @override
    def weight_version(self) -> int:
        return self._version

    @override
    def weight_fingerprint(self) -> float:
        return float(sum(parameter.abs().double().sum() for parameter in self._model.parameters()))

    def sleep(self) -> None:
        """Forget the cached conversations, and move the weights off an accelerator."""
        self._state.fall_asleep()
        self._conversations.clear()
        self._model.to("cpu")

    @override
    def wake(self) -> None:
        self._state.wake()
        self._model.to(self._device)

    @override
    def close(self) -> None:
        if self._state.close():
            self._queue.clear()
            self._conversations.clear()
            del self._model, self._names


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def _attends_to_everything(config: PreTrainedConfig) -> bool:
    """Whether every layer sees all earlier tokens, so that holes between cached columns do no harm."""
    config = config.get_text_config()  # a model of text and images says it there
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return set(layer_types) == {"full_attention"} and not getattr(config, "sliding_window", None)
