"""Eviction: what has to go, and in which order; never what is pinned."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from freshper_lightning.replay.columns import Columns, Floats, Integers

EvictionName = Literal["fifo", "lowest"]
_PIECE = 1024


class Eviction(ABC):
    """The order in which entries go when the buffer is full; entries that are being added are not among them."""

    def expired(self, columns: Columns, now: float) -> Integers:
        """Rows that have to go however much room there is."""
        return np.empty(0, np.int64)

    @abstractmethod
    def order(self, columns: Columns, masses: Callable[[], Floats]) -> Iterator[Integers]:
        """Rows that are not pinned, in pieces, the first to go first.

        Args:
            columns: All rows.
            masses: Evaluates the mass of every live row, in their order.
        """


@dataclass(frozen=True)
class Fifo(Eviction):
    """The oldest first."""

    def order(self, columns: Columns, masses: Callable[[], Floats]) -> Iterator[Integers]:
        """By id; priorities are not looked at."""
        for first in range(columns.start, columns.end, _PIECE):
            piece = slice(first, min(first + _PIECE, columns.end))
            yield first + np.flatnonzero(columns.live[piece] & ~columns.pinned[piece])


@dataclass(frozen=True)
class Lowest(Eviction):
    """The lowest priority of this moment first, the oldest of equal ones; O(N) whenever the buffer is full."""

    def order(self, columns: Columns, masses: Callable[[], Floats]) -> Iterator[Integers]:
        """By mass, then by id."""
        rows, mass = columns.live_rows(), masses()
        free = ~columns.pinned[rows]
        rows, mass = rows[free], mass[free]
        count = _PIECE
        while len(rows):
            first = smallest(mass, min(count, len(rows)))
            yield rows[first]
            rows, mass, count = np.delete(rows, first), np.delete(mass, first), 2 * count


@dataclass(frozen=True)
class HardAge(Fifo):
    """Whatever came in more than ``max_age`` units of the clock ago goes, and then the oldest first.

    It goes when something is added. Its age counts from :meth:`ReplayBuffer.add`, and a measured freshness does not
    restart it.

    Raises:
        ValueError: ``max_age`` is below 0 or not finite.
    """

    max_age: float = 100.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_age) and self.max_age >= 0):
            raise ValueError(f"max_age must be finite and at least 0, not {self.max_age}")

    def expired(self, columns: Columns, now: float) -> Integers:
        """Rows older than ``max_age``."""
        added = columns.added[columns.start : columns.end]
        last = columns.start + int(np.searchsorted(added, now - self.max_age))
        piece = slice(columns.start, last)
        return columns.start + np.flatnonzero(columns.live[piece] & ~columns.pinned[piece])


def smallest(values: Floats, count: int) -> Integers:
    """Indices of the ``count`` smallest values, in order, the first of equal ones first."""
    threshold = np.partition(values, count - 1)[count - 1]
    below = np.flatnonzero(values < threshold)
    ties = np.flatnonzero(values == threshold)[: count - len(below)]
    chosen = np.sort(np.concatenate([below, ties]))
    order: Integers = chosen[np.argsort(values[chosen], kind="stable")]
    return order


_EVICTIONS: dict[str, Eviction] = {"fifo": Fifo(), "lowest": Lowest()}


def eviction_of(eviction: EvictionName | Eviction) -> Eviction:
    """The order of that name.

    Raises:
        ValueError: There is no such name.
    """
    if isinstance(eviction, Eviction):
        return eviction
    if eviction not in _EVICTIONS:
        allowed = ", ".join(get_args(EvictionName))
        raise ValueError(f"eviction must be one of {allowed}, or an Eviction such as HardAge, not {eviction!r}")
    return _EVICTIONS[eviction]
