"""The rollout engine on vLLM, inside the trainer's process."""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from typing_extensions import override

from freshper_lightning.rollout.checkpoint import WeightNames, stop_token_ids
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.host import default_group_kept, host_state_kept, modules_hidden, random_state_kept
from freshper_lightning.rollout.requests import EngineState, check_request
from freshper_lightning.rollout.sampling import Truncation

SHARE_CHECKED = 0.01
"""Of a GPU's memory, that vLLM wants free at its start."""

RESERVED = {
    "model": "model.path",
    "dtype": "rollout.engine.dtype",
    "max_model_len": "rollout.engine.max_model_len",
    "max_num_seqs": "rollout.engine.max_batch_size",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_mib",
    "enforce_eager": "rollout.engine.enforce_eager",
    "seed": "seed_everything",
    "distributed_executor_backend": "the engine",
    "logprobs_mode": "the engine",
    "generation_config": "the engine",
    "skip_tokenizer_init": "the engine",
}
"""Arguments of ``vllm.LLM`` that are set already, and by what."""


def require_free(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of ``vllm.LLM`` that is set already."""
    for key in options:
        if key in RESERVED:
            raise ValueError(f"options must not name {key!r}, which {RESERVED[key]} sets")


class VLLMEngine(RolloutEngine):
    """vLLM as an engine whose log-probabilities are those of the distribution that it sampled from.

    With an ``external_launcher`` each training rank holds an engine of its own, which joins the process group if there
    is one and makes one of a single rank otherwise; all ranks must build theirs together. The process keeps its random
    states, threads, precision and environment, and a process group that existed before outlives :meth:`close`. The
    first engine of a process costs several seconds of import.

    ``options`` are further keyword arguments of ``vllm.LLM``; those that this class sets itself are refused.

    Raises:
        ValueError: ``options`` names an argument that is set here, the checkpoint names no stop token, or its attention
            heads have a size that vLLM cannot run on a CPU.
    """

    name = "vllm"

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        max_model_len: int = 1024,
        max_num_seqs: int = 64,
        kv_cache_memory_bytes: int = 64 << 20,
        enforce_eager: bool = True,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        require_free(options or {})
        arguments = {
            "model": str(model_path),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "enforce_eager": enforce_eager,
            "seed": seed,
            "distributed_executor_backend": "external_launcher",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
        }
        self._stop_ids = list(stop_token_ids(model_path))
        self._truncation = truncation or Truncation()
        self._max_model_len = max_model_len
        self._names = WeightNames(_meta_model(model_path))
        self._under_way: dict[int, GenerationRequest] = {}
        self._version = -1
        self._state = EngineState(self.name)
        self._joined_group = dist.is_initialized()
        with host_state_kept(), modules_hidden("llvmlite"):
            _prepare_environment()
            _require_head_size(model_path)
            self._llm = _build({**arguments, **(options or {})})
            self._eager_on_cpu = enforce_eager and _on_cpu()

    @override
    def submit(self, request: GenerationRequest) -> None:
        self._state.require_ready()
        check_request(request, self._max_model_len, self._under_way)
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        self._llm.llm_engine.add_request(str(request.request_id), prompt, self._sampling_params(request))
        self._under_way[request.request_id] = request

    def _sampling_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            stop_token_ids=self._stop_ids,
            top_p=self._truncation.top_p,
            top_k=self._truncation.top_k,
            min_tokens=min(self._truncation.min_tokens, request.max_tokens),
            repetition_penalty=self._truncation.repetition_penalty,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @override
    def poll(self, wait: bool = True) -> list[Completion]:
        self._state.require_ready()
        finished: list[Any] = []
        with random_state_kept(), self._without_compiler():
            while self._under_way and not finished:
                finished = self._llm.llm_engine.step()
                if not wait:
                    break
        return [self._completion(output) for output in finished]

    def _without_compiler(self) -> AbstractContextManager[object]:
        """On a CPU vLLM compiles helpers of its sampler even when eager, which takes seconds and a C++ compiler."""
        return torch.compiler.set_stance("force_eager") if self._eager_on_cpu else nullcontext()

    def _completion(self, output: Any) -> Completion:
        request = self._under_way.pop(int(output.request_id))
        reply = output.outputs[0]
        token_ids = tuple(reply.token_ids)
        log_probs = tuple(entry[token].logprob for token, entry in zip(token_ids, reply.logprobs, strict=True))
        if request.temperature == 0:
            log_probs = (0.0,) * len(token_ids)
        return Completion(request.request_id, token_ids, log_probs, reply.finish_reason, self._version)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Stream new weights in; see :meth:`RolloutEngine.load_weights`.

        A tied tensor is sent under all of its names: on a CPU vLLM keeps a repacked copy of the output head, which goes
        stale when only the embedding is sent.
        """
        with self._state.loading(len(self._under_way)):
            errors: list[Exception] = []
            stream = self._until_error(named_tensors, errors)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
            if errors:
                raise errors[0]
            self._drop_caches()
            self._version = version

    def _until_error(
        self, named_tensors: Iterable[tuple[str, Tensor]], errors: list[Exception]
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under all its names. An error ends the stream and is kept for the caller to raise, since vLLM
        leaves its layers beyond repair when it is interrupted half-way.
        """
        try:
            for name, tensor in self._names.checked(named_tensors):
                for alias in self._names.aliases(name):
                    yield alias, tensor
        except Exception as error:
            errors.append(error)

    def _drop_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which the old weights filled")
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    @property
    @override
    def weight_version(self) -> int:
        return self._version

    @override
    def weight_fingerprint(self) -> float:
        return float(self._llm.collective_rpc(_fingerprint)[0])

    def sleep(self) -> None:
        """Move weights to CPU memory and drop the KV cache, where the platform can; on a CPU only refuse requests.

        The path of GPUs (vLLM's sleep level 1) has not been run.
        """
        self._state.fall_asleep()
        if _sleep_available():
            self._llm.sleep(level=1)

    @override
    def wake(self) -> None:
        if _sleep_available():
            self._llm.wake_up()
        self._state.wake()

    def close(self) -> None:
        """Release everything; a default process group that the engine found is kept, one that it made is destroyed."""
        if self._state.close():
            self._under_way.clear()
            with default_group_kept() if self._joined_group else nullcontext():
                self._llm.llm_engine.engine_core.shutdown()
            del self._llm


def _meta_model(model_path: str | Path) -> torch.nn.Module:
    """The model's structure without any memory, for the names and shapes of its weights."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    return model


def _prepare_environment() -> None:
    """What vLLM reads at import and an external launcher would have set; what is there already wins."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "RANK": str(dist.get_rank() if dist.is_initialized() else 0),
        "WORLD_SIZE": str(dist.get_world_size() if dist.is_initialized() else 1),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _require_head_size(model_path: str | Path) -> None:
    """vLLM itself would end with a traceback, once the model is loaded."""
    if not _on_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if size not in allowed:
        raise ValueError(
            f"the attention heads of {model_path} have {size} dimensions, and on a CPU vLLM takes "
            f"{', '.join(map(str, allowed))}; rollout.engine.name=transformers takes any"
        )


def _build(arguments: dict[str, Any]) -> Any:
    """On a CPU prompts are never split: vLLM cannot rewind the generator of a seeded request there.

    On a GPU vLLM wants a share of the card free at its start, nearly all of it by default, though the size of its KV
    cache is given: beside a policy that is trained on the same card it would not start.
    """
    from vllm import LLM

    if _on_cpu():
        arguments = {**arguments, "enable_chunked_prefill": False}
    else:
        arguments = {"gpu_memory_utilization": SHARE_CHECKED, **arguments}
    return LLM(enable_sleep_mode=_sleep_available(), **arguments)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _sleep_available() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


def _fingerprint(worker: Any) -> Tensor:
    """Runs inside vLLM: parameters, and for layers whose weights were repacked their response to a vector of ones."""
    model = worker.get_model()
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total += parameter.detach().double().abs().sum().cpu()
    with torch.inference_mode():
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):
                total += layer.quant_method.apply(layer, _ones(layer)).double().abs().sum().cpu()
    return total


def _ones(layer: Any) -> Tensor:
    width = layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.embedding_dim
    return torch.ones(1, width, dtype=layer.weight.dtype)
