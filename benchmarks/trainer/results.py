"""Measured runs as rows, and medians over them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.trainer.cases import Case


@dataclass(frozen=True, slots=True)
class Row:
    """One process: medians over its iterations but the first."""

    model: str
    kind: str
    trainer: str
    precision: str
    micro_batches: int
    checkpointing: bool
    repetition: int
    iterations: int
    """That count."""
    seconds: float
    """Of an iteration; generation and training are its parts."""
    generation: float
    training: float
    prompt_tokens: int
    completion_tokens: int
    peak_mib: float
    """Largest resident size."""
    start_mib: float
    """Resident size ahead of the model."""
    threads: int
    load: float
    """Average number of busy tasks over the minute before the run."""
    seed: int
    commit: str
    versions: str
    machine: str

    @property
    def generation_speed(self) -> float:
        """Sampled tokens per second."""
        return self.completion_tokens / self.generation

    @property
    def training_speed(self) -> float:
        """Tokens of conversations, prompts included and padding not, per second."""
        return (self.prompt_tokens + self.completion_tokens) / self.training

    def is_of(self, model: str, case: Case) -> bool:
        """Whether the row belongs to a case."""
        own = (self.model, self.kind, self.trainer, self.precision, self.micro_batches, self.checkpointing)
        return own == (model, case.kind, case.trainer, case.precision, case.micro_batches, case.checkpointing)


@dataclass(frozen=True, slots=True)
class Results:
    """Rows by what they are about."""

    rows: Sequence[Row]

    def has(self, model: str, case: Case, repetition: int) -> bool:
        """Whether a run is there."""
        return any(row.repetition == repetition for row in self.of(model, case))

    def of(self, model: str, case: Case) -> list[Row]:
        """The runs of a case."""
        return [row for row in self.rows if row.is_of(model, case)]

    def models(self) -> list[str]:
        """In the order in which they were measured first."""
        return list(dict.fromkeys(row.model for row in self.rows))

    def median(self, model: str, case: Case, value: Callable[[Row], float]) -> float | None:
        """Median over the runs; None where there is none."""
        rows = self.of(model, case)
        return statistics.median(map(value, rows)) if rows else None
