"""Held-out trajectories: never trained on, so that what the policy thinks of them is drift and not memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from freshper_lightning.replay.buffer import ReplayBuffer
from freshper_lightning.replay.clock import ClockName
from freshper_lightning.replay.columns import Floats
from freshper_lightning.replay.decay import NoDecay
from freshper_lightning.replay.priority import UniformPriority
from freshper_lightning.replay.requirements import require
from freshper_lightning.trajectory import ClockReading, Trajectory


class HeldOut:
    """A part of each iteration, chosen whatever it is worth, that stays out of training for good.

    Which trajectories these are, and which of them a probe looks at, is a function of seed and iteration alone. The
    oldest go first when ``capacity`` is exceeded.

    Args:
        capacity: Greatest number of trajectories.
        clock: Unit of age.
        seed: At least 0; ranks need seeds of their own.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, capacity: int, clock: ClockName, seed: int = 0) -> None:
        self._store = ReplayBuffer(capacity, UniformPriority(), NoDecay(), clock, seed=seed, asynchronous=False)

    def __len__(self) -> int:
        return len(self._store)

    def take(self, trajectories: Sequence[Trajectory], count: int, now: ClockReading) -> list[Trajectory]:
        """Holds out ``count`` of the trajectories, or all where there are fewer, and returns the others in order.

        Raises:
            ValueError: ``count`` is above the capacity, or the clock ran backwards.
        """
        require(count >= 0, "count", count, "at least 0")
        chosen = set(self._random(now, 0).permutation(len(trajectories))[:count].tolist())
        self._store.add([item for index, item in enumerate(trajectories) if index in chosen], now)
        return [item for index, item in enumerate(trajectories) if index not in chosen]

    def probe(self, n: int, now: ClockReading) -> tuple[tuple[Trajectory, ...], Floats]:
        """``n`` distinct trajectories evenly over the order of birth, or all where there are fewer, and their ages.

        As every iteration holds out as many, that is evenly over age, whatever tau draws for training.
        """
        ids, ages = self._store.ids(), self._store.ages(now)
        n = min(n, len(ids))
        places = ((self._random(now, 1).random() + np.arange(n)) * (len(ids) / max(n, 1))).astype(np.int64)
        return self._store.get(ids[places]), ages[places]

    def _random(self, now: ClockReading, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self._store.seed, purpose, now.iteration))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives."""
        return self._store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: It was made with another clock, or exceeds the capacity.
        """
        self._store.load_state_dict(state)
