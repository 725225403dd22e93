"""The published buffer's algorithm, written anew from its description: loops over the capacity, in Python.

Slots with a validity mask; a sum tree and a minimum tree that hold ``priority**alpha`` of every slot but are not
searched; the first free or the oldest slot is looked for once per trajectory; a draw lists what is valid, adds up the
total, and walks to each point from the start; weights look at every slot; the decay is a rewriting of all leaves.
Source: Ma et al. 2026 (2604.16918) and its public code.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.replay.contender import ALPHA, BETA, EPS, TAU, Contender
from benchmarks.replay.payload import BATCH, Batch
from freshper_lightning.trajectory import Trajectory

_FLOOR = 1e-8


class SegmentTree:
    """A complete binary tree in a list; a write costs its depth."""

    def __init__(self, capacity: int, combine: Callable[[float, float], float], neutral: float) -> None:
        self._size = 1 << max(capacity - 1, 1).bit_length()
        self._combine = combine
        self._nodes = [neutral] * (2 * self._size)

    def __setitem__(self, slot: int, value: float) -> None:
        node = slot + self._size
        self._nodes[node] = value
        while node > 1:
            node //= 2
            self._nodes[node] = self._combine(self._nodes[2 * node], self._nodes[2 * node + 1])

    def __getitem__(self, slot: int) -> float:
        return self._nodes[slot + self._size]


def _plus(left: float, right: float) -> float:
    return left + right


def entry_of(trajectory: Trajectory) -> dict[str, Tensor]:
    """What the published buffer keeps of a trajectory: 27 bytes for each position."""
    length, response = trajectory.num_tokens, trajectory.sampled_mask()
    log_probs = torch.zeros(length)
    log_probs[trajectory.sampled_positions()] = trajectory.behavior_log_probs
    return {
        "input_ids": trajectory.token_ids.long(),
        "position_ids": torch.arange(length),
        "attention_mask": torch.ones(length, dtype=torch.bool),
        "response_mask": response,
        "prompt_mask": ~response,
        "token_scores": torch.zeros(length),
        "log_probs": log_probs,
    }


class Published(Contender):
    """The loops as they are published; nothing is faster or slower on purpose."""

    def __init__(self, capacity: int, batches: Sequence[Batch]) -> None:
        super().__init__(capacity, batches)
        self._entries: list[dict[str, Tensor] | None] = [None] * capacity
        self._valid, self._base, self._pushed = [False] * capacity, [0.0] * capacity, [0] * capacity
        self._sum, self._minimum = SegmentTree(capacity, _plus, 0.0), SegmentTree(capacity, min, float("inf"))
        self._made = [[entry_of(item) for item in batch.trajectories] for batch in batches]

    def fill(self, batches: int) -> None:
        """Writes slots in order, which leaves the same behind and does not take hours."""
        for slot in range(batches * BATCH):
            if slot % BATCH == 0:
                batch = self.next_batch()
            self._store(slot, slot % BATCH, batch)

    def add(self) -> None:
        """A search through the slots for each trajectory."""
        batch = self.next_batch()
        for index in range(BATCH):
            self._store(self._slot(), index, batch)

    def _slot(self) -> int:
        for slot in range(self.capacity):
            if not self._valid[slot]:
                return slot
        oldest = 0
        for slot in range(self.capacity):
            if self._pushed[slot] < self._pushed[oldest]:
                oldest = slot
        return oldest

    def _store(self, slot: int, index: int, batch: Batch) -> None:
        self._entries[slot] = self._made[self.index][index]
        self._valid[slot], self._base[slot], self._pushed[slot] = True, float(batch.priorities[index]), self.now
        self._write(slot, 1.0)  # the greatest priority so far, until the next refresh

    def _write(self, slot: int, leaf: float) -> None:
        self._sum[slot] = leaf
        self._minimum[slot] = leaf

    def keys(self) -> NDArray[np.int64]:
        """Slots in use."""
        return np.flatnonzero(self._valid)

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """Two tree writes each."""
        for slot, priority in zip(keys.tolist(), priorities.tolist(), strict=True):
            self._base[slot] = max(priority, EPS)
            self._write(slot, self._base[slot] ** ALPHA)

    def draw(self) -> None:
        """Slots and weights."""
        self._weights(self._slots())

    def draw_and_read(self) -> None:
        """Slots, weights and tensors of all fields."""
        slots = self._slots()
        self._weights(slots)
        entries = [entry for slot in slots if (entry := self._entries[slot]) is not None]
        _ = {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}

    def _slots(self) -> list[int]:
        valid = [slot for slot in range(self.capacity) if self._valid[slot]]
        total = 0.0
        for slot in valid:
            total += self._sum[slot]
        points = (np.arange(BATCH) + np.random.random(BATCH)) * (total / BATCH)
        return [self._walk(valid, point) for point in points.tolist()]

    def _walk(self, valid: list[int], point: float) -> int:
        running = 0.0
        for slot in valid:
            running += self._sum[slot]
            if running >= point:
                return slot
        return valid[-1]

    def _weights(self, slots: list[int]) -> list[float]:
        total, count, least = 0.0, 0, float("inf")
        for slot in range(self.capacity):
            if self._valid[slot]:
                leaf = self._sum[slot]
                total, count, least = total + leaf, count + 1, min(least, leaf)
        highest = (count * least / total) ** -BETA
        return [(count * self._sum[slot] / total) ** -BETA / highest for slot in slots]

    def decay(self) -> None:
        """Every slot: its age, an exponential, a power, two tree writes."""
        self.now += 1
        for slot in range(self.capacity):
            if self._valid[slot]:
                age = max(self.now - self._pushed[slot], 0)
                priority = self._base[slot] * float(np.exp(-age / TAU))
                self._write(slot, max(priority, _FLOOR) ** ALPHA)

    def nbytes(self) -> int:
        """Tensors of all slots, as if none were shared."""
        size = sum(int(tensor.nbytes) for tensor in self._made[0][0].values())
        return size * sum(self._valid)
