"""cpprb's prioritized buffer: segment trees in C++ over preallocated arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpprb
import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.contender import ALPHA, BETA, EPS, Slots
from benchmarks.replay.payload import BATCH, Batch


class _Buffer(cpprb.PrioritizedReplayBuffer):  # type: ignore[misc]
    """Can leave the reading of what it has drawn away, which ``sample`` always does."""

    reads = False

    def _encode_sample(self, idx: Any) -> dict[str, NDArray[Any]]:
        read: dict[str, NDArray[Any]] = super()._encode_sample(idx) if self.reads else {}
        return read


class Cpprb(Slots):
    """``PrioritizedReplayBuffer``."""

    def __init__(self, capacity: int, batches: Sequence[Batch]) -> None:
        super().__init__(capacity, batches)
        self._buffer = self._new()

    def _new(self) -> _Buffer:
        fields = {
            name: {"shape": array.shape[1:] or 1, "dtype": array.dtype}
            for name, array in self.batches[0].arrays.items()
        }
        return _Buffer(self.capacity, fields, alpha=ALPHA, eps=EPS)

    def add(self) -> None:
        """``add`` with priorities."""
        batch = self.next_batch()
        self.take_slots(batch)
        self._buffer.add(**batch.arrays, priorities=batch.priorities)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """``update_priorities``."""
        self._base[keys] = priorities
        self._buffer.update_priorities(keys, priorities)

    def draw(self) -> None:
        """``sample`` without reading."""
        self._buffer.reads = False
        self._buffer.sample(BATCH, BETA)

    def draw_and_read(self) -> None:
        """``sample``."""
        self._buffer.reads = True
        self._buffer.sample(BATCH, BETA)

    def decay(self) -> None:
        """``update_priorities`` of everything."""
        self._buffer.update_priorities(np.arange(self._stored), self.decayed())

    def save(self, path: Path) -> None:
        """``save_transitions``, which compresses, and leaves priorities out."""
        self._buffer.reads = True
        self._buffer.save_transitions(str(path))

    def load(self, path: Path) -> None:
        """``load_transitions``."""
        self._new().load_transitions(str(path) + ".npz")
