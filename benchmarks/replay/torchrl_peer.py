"""torchrl's prioritized buffer over preallocated tensors."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler
from torchrl.data import ReplayBuffer as TorchRLBuffer

from benchmarks.replay.contender import ALPHA, BETA, EPS, Slots
from benchmarks.replay.payload import BATCH, Batch

logging.getLogger("torchrl").setLevel(logging.WARNING)


class TorchRL(Slots):
    """``ReplayBuffer`` with a ``PrioritizedSampler``, the form with the least around it."""

    def __init__(self, capacity: int, batches: Sequence[Batch]) -> None:
        super().__init__(capacity, batches)
        self._made = [
            TensorDict({name: torch.from_numpy(array) for name, array in batch.arrays.items()}, [BATCH])
            for batch in batches
        ]
        self._buffer = self._new()

    def _new(self) -> TorchRLBuffer:
        return TorchRLBuffer(
            storage=LazyTensorStorage(self.capacity),
            sampler=PrioritizedSampler(self.capacity, ALPHA, BETA, EPS),
            batch_size=BATCH,
        )

    def add(self) -> None:
        """``extend`` and ``update_priority``."""
        batch = self.next_batch()
        self.take_slots(batch)
        slots = self._buffer.extend(self._made[self.index])
        self._buffer.update_priority(slots, torch.from_numpy(batch.priorities).float())

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """``update_priority``."""
        self._base[keys] = priorities
        self._buffer.update_priority(torch.from_numpy(keys), torch.from_numpy(priorities).float())

    def draw(self) -> None:
        """The sampler alone."""
        self._buffer.sampler.sample(self._buffer.storage, BATCH)

    def draw_and_read(self) -> None:
        """``sample``."""
        self._buffer.sample()

    def decay(self) -> None:
        """``update_priority`` of everything."""
        self._buffer.update_priority(torch.arange(self._stored), torch.from_numpy(self.decayed()))

    def save(self, path: Path) -> None:
        """``dumps``: one mapped file for each field and tree."""
        self._buffer.dumps(path)

    def load(self, path: Path) -> None:
        """``loads`` into a buffer whose storage has been made."""
        buffer = self._new()
        buffer.extend(self._made[0])
        buffer.loads(path)
