"""Which rollout engine runs, decided from configuration and from what is installed."""

import logging
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from freshper_lightning.rollout.engine import RolloutEngine
from freshper_lightning.rollout.episode import MIN_ROOM
from freshper_lightning.rollout.sampling import Truncation
from freshper_lightning.rollout.transformers_engine import TransformersEngine
from freshper_lightning.rollout.vllm_engine import VLLMEngine, require_free

logger = logging.getLogger(__name__)

EngineName = Literal["auto", "transformers", "vllm"]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class EngineConfig:
    """How replies are generated, whatever generates them.

    Raises:
        ValueError: A value is not allowed; the message names the key and what is.
    """

    name: EngineName = "auto"
    """``auto`` takes vLLM where it is installed."""
    dtype: Precision = "float32"
    """Precision of the engine's copy of the weights; ratios are exact at age 0 only where it is the trainer's."""
    max_model_len: int = 1024
    """Longest conversation, in tokens."""
    max_batch_size: int = 64
    """Most replies that are sampled at the same time."""
    kv_cache_mib: int = 256
    """Memory for keys and values, in MiB; the Transformers engine keeps finished turns in it, and 0 keeps none."""
    enforce_eager: bool = True
    """vLLM: run without compilation, which takes minutes on a CPU."""
    options: dict[str, Any] = field(default_factory=dict)
    """vLLM: further keyword arguments of ``vllm.LLM``."""

    def __post_init__(self) -> None:
        for key, allowed in (("name", EngineName), ("dtype", Precision)):
            if getattr(self, key) not in get_args(allowed):
                raise ValueError(f"{key} must be one of {', '.join(get_args(allowed))}, not {getattr(self, key)!r}")
        for key, least in (("max_model_len", MIN_ROOM + 1), ("max_batch_size", 1), ("kv_cache_mib", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, not {getattr(self, key)}")
        if self.name == "vllm" and self.kv_cache_mib == 0:
            raise ValueError("kv_cache_mib must be positive for the vllm engine, not 0")
        if self.name == "transformers" and self.options:
            raise ValueError(f"options must be empty for the transformers engine, not {self.options}")
        require_free(self.options)

    def resolve(self) -> tuple[Literal["transformers", "vllm"], str]:
        """The engine that runs and the reason, in words.

        Raises:
            ValueError: vLLM is asked for by name and is not installed.
        """
        installed = find_spec("vllm") is not None
        if self.name == "transformers":
            return "transformers", "asked for by name"
        if self.name == "vllm":
            if not installed:
                raise ValueError("name='vllm' needs vLLM, which is not installed; use name='transformers' or 'auto'")
            return "vllm", "asked for by name"
        if installed:
            return "vllm", "auto: vLLM is installed"
        return "transformers", "auto: vLLM is not installed"


def build_engine(
    config: EngineConfig,
    model_path: str | Path,
    seed: int,
    device: str | torch.device,
    truncation: Truncation | None = None,
) -> RolloutEngine:
    """The engine that ``config`` names, with the weights of the checkpoint at ``model_path``; the log says which.

    ``seed`` is what vLLM is started with; samples depend on the seeds of their requests alone.
    """
    name, reason = config.resolve()
    logger.info("rollouts run on the %s engine (%s)", name, reason)
    if name == "transformers":
        return TransformersEngine(
            model_path,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_batch_size=config.max_batch_size,
            device=device,
            kv_cache_mib=config.kv_cache_mib,
            truncation=truncation,
        )
    return VLLMEngine(
        model_path,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_batch_size,
        kv_cache_memory_bytes=config.kv_cache_mib << 20,
        enforce_eager=config.enforce_eager,
        seed=seed,
        options=config.options,
        truncation=truncation,
    )
