"""What a draw hands out."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freshper_lightning.replay.columns import Floats, Integers
from freshper_lightning.trajectory import Trajectory

COLUMNS = ("ids", "probabilities", "weights", "ages", "multiplicities")


@dataclass(frozen=True, eq=False)
class Draw:
    """One draw of ``n`` trajectories; all fields describe the same moment.

    ``weights`` multiply the loss of a trajectory and undo, as far as ``beta`` says, that it was drawn by priority.
    """

    ids: Integers
    """int64 [n]; with replacement an id may come up several times."""
    probabilities: Floats
    """float64 [n]: share of the total mass of each drawn entry, above 0."""
    weights: Floats
    """float64 [n]: ``(N P)**-beta`` over its maximum; see :class:`~freshper_lightning.replay.weights.Weighting`."""
    ages: Floats
    """float64 [n]: age in units of the clock, since collection or the last measurement of freshness."""
    multiplicities: Floats
    """float64 [n]: of how many draws with replacement from one buffer each is worth, 1 for those that are such draws.

    What a loss divides by, such as a number of tokens, has the expectation of one buffer when it is summed with these.
    """
    _read: Callable[[Integers], tuple[Trajectory, ...]] = field(repr=False)
    _lock: AbstractContextManager[Any] = field(repr=False)
    """The buffer's own, so that nothing is evicted between a look and a read."""
    _found: list[Trajectory] = field(default_factory=list, repr=False)

    def __reduce__(self) -> tuple[Callable[..., "Draw"], tuple[Any, ...]]:
        """A copy, and a draw that was pickled, has its trajectories with it and needs no buffer."""
        numbers = self.ids, self.probabilities, self.weights, self.ages, self.multiplicities
        return Draw, (*numbers, _nothing, nullcontext(), list(self.trajectories))

    @classmethod
    def of(cls, columns: Mapping[str, Tensor], read: Callable[[Integers], tuple[Trajectory, ...]]) -> "Draw":
        """The draw that :meth:`columns` was taken of; ``read`` finds its trajectories."""
        ids, probabilities, weights, ages, multiplicities = (columns[name].numpy() for name in COLUMNS)
        return cls(ids, probabilities, weights, ages, multiplicities, read, nullcontext())

    def columns(self) -> dict[str, Tensor]:
        """Copies of the five arrays, by name."""
        return {name: torch.tensor(getattr(self, name)) for name in COLUMNS}

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The trajectory of each id; read when first asked for, or before one of them is evicted."""
        with self._lock:
            if not self.is_read():
                self._found.extend(self._read(self.ids))
            return tuple(self._found)

    def is_read(self) -> bool:
        """Whether the trajectories have been read."""
        return len(self._found) == len(self.ids)

    def weight_sums(self) -> tuple[float, float]:
        """Sum of weights and of their squares; those of the draws of several ranks add up.

        An id that comes up several times counts once, with the sum of its weights, so that ``(sum w)**2 / sum w**2`` is
        the number of equally weighted, distinct trajectories that say as much.
        """
        _, which = np.unique(self.ids, return_inverse=True)
        weights = np.bincount(which, self.weights)
        return float(weights.sum()), float(np.square(weights).sum())


def _nothing(ids: Integers) -> tuple[Trajectory, ...]:
    return ()


class HandedOut:
    """Draws whose trajectories may still have to be read; those that nobody holds any more are forgotten."""

    def __init__(self) -> None:
        self._draws: weakref.WeakSet[Draw] = weakref.WeakSet()

    def add(self, draw: Draw) -> None:
        """Remembers a draw."""
        self._draws.add(draw)

    def read(self) -> None:
        """Reads the trajectories of all draws, before some of them go."""
        for draw in list(self._draws):
            if not draw.is_read():
                _ = draw.trajectories
        self._draws.clear()
