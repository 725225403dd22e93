"""What a buffer has to do to be measured."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.payload import BATCH, Batch

ALPHA, BETA, TAU, EPS = 0.6, 0.4, 500.0, 1e-6
"""Exponents of priorities and weights, time constant of the exponential decay in updates, offset of priorities."""
UPDATES = 4
"""Updates for each batch that is added."""


class Contender(ABC):
    """A prioritized buffer of trajectories that is full of batches; every method does all of what it is named after.

    The clock goes on by ``UPDATES`` with every batch that is added, and by 1 where time alone goes by.

    Args:
        capacity: Trajectories that fit in.
        batches: What is added, one after the other, again and again.
    """

    decays = True
    """Whether priorities fall with age."""

    def __init__(self, capacity: int, batches: Sequence[Batch]) -> None:
        self.capacity, self.batches = capacity, batches
        self.now = self.added = 0

    def next_batch(self) -> Batch:
        """What comes in next; the clock goes on."""
        self.now, self.added = self.now + UPDATES, self.added + 1
        return self.batches[self.index]

    @property
    def index(self) -> int:
        """Which of the batches came in last."""
        return self.added % len(self.batches)

    def fill(self, batches: int) -> None:
        """Adds so many batches."""
        for _ in range(batches):
            self.add()

    @abstractmethod
    def add(self) -> None:
        """Stores the next ``BATCH`` trajectories with their priorities, the oldest giving way."""

    @abstractmethod
    def keys(self) -> NDArray[np.int64]:
        """Names of what is stored, for :meth:`update`."""

    @abstractmethod
    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """Replaces base priorities."""

    @abstractmethod
    def draw(self) -> None:
        """Draws ``BATCH`` entries: which, and their importance weights."""

    @abstractmethod
    def draw_and_read(self) -> None:
        """The same, and what is stored of them."""

    @abstractmethod
    def decay(self) -> None:
        """Lets time go by and brings the priorities of everything to the new moment."""

    def decay_and_draw(self) -> None:
        """A draw at the priorities of a new moment."""
        self.decay()
        self.draw()

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are held for what is stored."""


class Saving(Contender):
    """A contender that can be saved and loaded."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Writes everything to a file or a new folder."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Reads that into a new, empty buffer, which is then dropped."""


class Slots(Saving):
    """What buffers of fixed slots have in common: base priority and time of every slot, from which decay is computed.

    They have no decay of their own, so that it is an update of all priorities.
    """

    def __init__(self, capacity: int, batches: Sequence[Batch]) -> None:
        super().__init__(capacity, batches)
        self._base = np.zeros(capacity)
        self._since = np.zeros(capacity)
        self._next = self._stored = 0

    def keys(self) -> NDArray[np.int64]:
        """Slots in use."""
        return np.arange(self._stored)

    def take_slots(self, batch: Batch) -> NDArray[np.int64]:
        """Slots [BATCH] that the batch goes to, oldest first."""
        slots = (self._next + np.arange(BATCH)) % self.capacity
        self._next, self._stored = self._next + BATCH, min(self._stored + BATCH, self.capacity)
        self._base[slots], self._since[slots] = batch.priorities, self.now
        return slots

    def decayed(self) -> NDArray[np.float32]:
        """Priorities of all slots in use, at a new moment."""
        self.now += 1
        base, since = self._base[: self._stored], self._since[: self._stored]
        priorities: NDArray[np.float32] = (base * np.exp((since - self.now) / TAU)).astype(np.float32)
        return priorities

    def nbytes(self) -> int:
        """Arrays of all slots in use, without the trees."""
        return sum(array.nbytes for array in self.batches[0].arrays.values()) * self._stored // BATCH
