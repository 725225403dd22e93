"""Measured numbers as rows of a CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar


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


_Row = TypeVar("_Row", Row, MemoryRow)


def read(path: Path, kind: type[_Row]) -> list[_Row]:
    """All rows; none where there is no file."""
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(kind)}
    with path.open(newline="") as file:
        return [kind(**{name: _value(row[name], types[name]) for name in types}) for row in csv.DictReader(file)]


def _value(text: str, kind: object) -> Any:
    if kind is str:
        return text
    if kind is int:
        return int(text)
    return float(text) if text else None


def write(path: Path, rows: Sequence[_Row]) -> None:
    """Replaces the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    temporary.replace(path)


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
