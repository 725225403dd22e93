"""Sampling of a whole batch, one token of each reply at a time, without a loop over rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freshper_lightning.errors import NonFiniteError
from freshper_lightning.rollout.engine import Completion, GenerationRequest
from freshper_lightning.rollout.kv_cache import Tokens
from freshper_lightning.rollout.sampling import Truncation, draw, penalize_repetition, truncate, uniforms


class SampledTokens:
    """The growing replies of one batch; row ``r`` answers request ``r``.

    ``is_stop`` is bool [V]. The uniform of a token is a hash of the request's seed and of the token's place in the
    conversation.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[Tokens],
        is_stop: Tensor,
        truncation: Truncation,
    ) -> None:
        device = is_stop.device
        self._requests = requests
        self._is_stop = is_stop
        self._truncation = truncation
        self._seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        self._starts = np.array([len(prompt) for prompt in prompts], dtype=np.uint64)
        temperatures = torch.tensor([request.temperature for request in requests], device=device)
        self._greedy = temperatures == 0
        self._divisor = torch.where(self._greedy, 1.0, temperatures)[:, None]
        self._limits = torch.tensor([request.max_tokens for request in requests], device=device)
        self._seen = _occurrences(prompts, len(is_stop), device) if truncation.repetition_penalty != 1 else None
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._lengths = torch.zeros_like(self._limits)
        self._stopped = torch.zeros_like(self._greedy)
        self.active = torch.ones_like(self._greedy)
        """bool [B]: replies that have not ended."""

    @property
    def last_tokens(self) -> Tensor:
        """int64 [B]: what was drawn last, to be fed to the model next."""
        return self._tokens[-1]

    def step(self, logits: Tensor) -> bool:
        """Draw one token of every reply from logits [B, V]; whether any reply goes on."""
        log_probs = self._process(logits.float()).log_softmax(-1)
        if bool(log_probs.isnan().any()):
            raise NonFiniteError("the engine's logits are NaN: its weights are, or its dtype cannot hold them")
        positions = self._starts + np.uint64(len(self._tokens))
        uniform = torch.from_numpy(uniforms(self._seeds, positions)).to(logits.device)
        tokens = torch.where(self._greedy, log_probs.argmax(-1), draw(log_probs, uniform))
        drawn = log_probs.gather(1, tokens[:, None])[:, 0]
        self._tokens.append(tokens)
        self._log_probs.append(torch.where(self._greedy, 0.0, drawn))
        self._lengths += self.active
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        self._stopped |= self.active & self._is_stop[tokens]
        self.active = self.active & ~self._stopped & (self._lengths < self._limits)
        return bool(self.active.any())

    def _process(self, logits: Tensor) -> Tensor:
        """Penalty, forbidden stops, temperature, truncation: the order in which vLLM applies them."""
        if self._seen is not None:
            logits = penalize_repetition(logits, self._seen, self._truncation.repetition_penalty)
        if len(self._tokens) < self._truncation.min_tokens:
            logits = logits.masked_fill(self._is_stop, -torch.inf)
        return truncate(logits / self._divisor, self._truncation.top_k, self._truncation.top_p)

    def seen_tokens(self, prompts: Sequence[Tokens]) -> tuple[Tokens, ...]:
        """The tokens of each conversation that the model has read: all but the last one."""
        replies = torch.stack(self._tokens, dim=1).cpu().numpy()
        lengths = self._lengths.tolist()
        return tuple(np.concatenate([prompt, replies[row, : lengths[row] - 1]]) for row, prompt in enumerate(prompts))

    def completions(self, weight_version: int) -> list[Completion]:
        """The finished replies."""
        tokens = torch.stack(self._tokens, dim=1).tolist()
        log_probs = torch.stack(self._log_probs, dim=1).tolist()
        lengths, stopped = self._lengths.tolist(), self._stopped.tolist()
        return [
            Completion(
                request.request_id,
                tuple(tokens[row][: lengths[row]]),
                tuple(log_probs[row][: lengths[row]]),
                "stop" if stopped[row] else "length",
                weight_version,
            )
            for row, request in enumerate(self._requests)
        ]


def _occurrences(prompts: Sequence[Tokens], vocab_size: int, device: torch.device) -> Tensor:
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, torch.from_numpy(prompt).to(device)] = True
    return seen
