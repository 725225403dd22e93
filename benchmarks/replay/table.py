"""Measured numbers as rows of a CSV file."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import read, write

__all__ = ["MemoryRow", "Results", "Row", "read", "write"]


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of one buffer at one size; times in milliseconds, and bytes of one trajectory."""

    size: int
    """Trajectories in the buffer."""
    tokens: int
    """Of each trajectory."""
    buffer: str
    operation: str
    median: float | None
    """None where one repetition took longer than ``limit_s``."""
    lower_quartile: float | None
    upper_quartile: float | None
    least: float | None
    repetitions: int
    limit_s: float
    commit: str
    machine: str


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes per token of this project's buffer."""

    tokens: int
    turns: int
    sampled: float
    """Share of the tokens that the policy wrote."""
    log_prob_dtype: str
    trajectories: int
    stored: float
    """Bytes per token of what is stored, with rows and handles: what ``max_bytes`` bounds."""
    held: float
    """Bytes per token of the memory that is held for it."""


@dataclass(frozen=True, slots=True)
class Results:
    """Rows by what they are about."""

    rows: Sequence[Row]

    def sizes(self) -> list[int]:
        """Sizes that were measured, increasing."""
        return sorted({row.size for row in self.rows})

    def has(self, size: int, buffer: str) -> bool:
        """Whether a buffer was measured at a size."""
        return any((row.size, row.buffer) == (size, buffer) for row in self.rows)

    def find(self, size: int, buffer: str, operation: str) -> Row | None:
        """The row, if there is one."""
        key = (size, buffer, operation)
        return next((row for row in self.rows if (row.size, row.buffer, row.operation) == key), None)

    def median(self, size: int, buffer: str, *operations: str) -> float | None:
        """Sum of the medians; None where one is missing."""
        rows = [self.find(size, buffer, operation) for operation in operations]
        medians = [row.median for row in rows if row is not None and row.median is not None]
        return sum(medians) if len(medians) == len(operations) else None
