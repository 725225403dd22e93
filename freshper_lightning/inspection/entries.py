"""Stored trajectories with everything that their buffer says of them."""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from freshper_lightning.replay import ReplayBuffer
from freshper_lightning.replay.clock import ClockName
from freshper_lightning.replay.decay import log_freshness
from freshper_lightning.trajectory import ClockReading, Trajectory

Sort = Literal["priority", "age", "return", "advantage", "newest", "draws"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored trajectory at one reading of the clock; every number is the buffer's own."""

    id: int
    trajectory: Trajectory
    clock: ClockName
    """What ``age`` is counted in."""
    age: float
    """Since collection, or since freshness was last measured."""
    base: float
    """Base priority."""
    freshness: float
    """As it was measured last; 1 for what was never measured."""
    decay: float
    """Factor of the decay at ``age``."""
    probability: float
    """``priority**alpha`` over its sum: probability of one draw, where priorities say what is drawn."""
    uniform: float
    """Probability of one draw if all that is stored were drawn alike."""
    draws: int
    """How many times it was drawn."""

    @property
    def priority(self) -> float:
        """``base x freshness x decay``."""
        return self.base * self.freshness * self.decay

    def mean_advantage(self) -> float | None:
        """Mean over sampled tokens; None where there are no advantages yet."""
        known = self.trajectory.advantages is not None
        return float(self.trajectory.token_advantages().double().mean()) if known else None


def entries(buffer: ReplayBuffer, now: ClockReading, ids: ArrayLike | None = None) -> Iterator[Entry]:
    """Entries of ``ids`` [n], or of all that is stored, oldest first; trajectories are read one by one.

    Nothing may be added to the buffer meanwhile. Looking does not count as drawing.

    Raises:
        ValueError: An id is not stored, or the clock ran backwards.
    """
    stored = buffer.ids()
    wanted = stored if ids is None else np.asarray(ids, np.int64)
    unknown = wanted[~np.isin(wanted, stored)].tolist()
    if unknown:
        held = f"{len(stored)} ids from {stored[0]} to {stored[-1]}" if len(stored) else "nothing"
        raise ValueError(f"ids={unknown} must be stored in the buffer, which holds {held}")
    places = np.searchsorted(stored, wanted)
    ages = buffer.ages(now)[places]
    columns = (
        wanted,
        ages,
        buffer.bases(wanted),
        buffer.freshness(wanted),
        np.exp(log_freshness(buffer.decay, ages)),
        buffer.probabilities(now)[places],
        buffer.times_drawn(wanted),
    )
    return (_entry(buffer, 1 / len(stored), *row) for row in zip(*(c.tolist() for c in columns), strict=True))


def _entry(
    buffer: ReplayBuffer,
    uniform: float,
    id: int,
    age: float,
    base: float,
    freshness: float,
    decay: float,
    probability: float,
    draws: int,
) -> Entry:
    (trajectory,) = buffer.get([id])
    return Entry(id, trajectory, buffer.clock, age, base, freshness, decay, probability, uniform, draws)


def _advantage(entry: Entry) -> float:
    found = entry.mean_advantage()
    return -math.inf if found is None else found


SORTS: dict[Sort, Callable[[Entry], float]] = {
    "priority": lambda entry: entry.priority,
    "age": lambda entry: entry.age,
    "return": lambda entry: entry.trajectory.episode_return,
    "advantage": _advantage,
    "newest": lambda entry: entry.id,
    "draws": lambda entry: entry.draws,
}
"""What is greatest in the entry that comes first."""


def first(buffer: ReplayBuffer, now: ClockReading, sort: Sort = "priority", top: int = 5) -> list[Entry]:
    """The ``top`` entries that are greatest in ``sort``, of equal ones the oldest first.

    Raises:
        ValueError: There is no such order, or ``top`` is below 1.
    """
    if sort not in SORTS:
        raise ValueError(f"sort={sort!r} must be one of {', '.join(SORTS)}")
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    return heapq.nlargest(top, entries(buffer, now), key=SORTS[sort])
