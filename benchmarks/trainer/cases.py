"""What is compared."""

from dataclasses import dataclass
from typing import Literal

OURS_VLLM, OURS_TRANSFORMERS, OURS, TRL = "ours, vLLM", "ours, Transformers", "ours", "TRL"
ENGINES = {OURS_VLLM: "vllm", OURS_TRANSFORMERS: "transformers", OURS: "transformers", TRL: "trl"}
"""By trainer; ``ours`` alone is one that samples nothing."""

TRLS_MICRO_BATCHES = 4
"""Of 8 conversations each, which is how many TRL takes by default."""

Kind = Literal["whole", "ragged"]
"""An iteration with completions of one length that are sampled in it, or training on given ones of many lengths."""


@dataclass(frozen=True, slots=True)
class Case:
    """One trainer under one setting."""

    kind: Kind
    trainer: str
    precision: str
    micro_batches: int = 1
    checkpointing: bool = False


def cases() -> list[Case]:
    """All of them; those that are compared with one another are run one after the other."""
    plain = [
        case
        for precision in ("float32", "bfloat16")
        for case in (
            *(Case("whole", trainer, precision) for trainer in (OURS_VLLM, TRL, OURS_TRANSFORMERS)),
            *(Case("ragged", trainer, precision, TRLS_MICRO_BATCHES) for trainer in (OURS, TRL)),
        )
    ]
    # TRL's defaults: few conversations at a time, and layers that are computed again in the backward pass.
    frugal = [
        Case("whole", trainer, "float32", TRLS_MICRO_BATCHES, True) for trainer in (OURS_VLLM, TRL, OURS_TRANSFORMERS)
    ]
    return plain + frugal
