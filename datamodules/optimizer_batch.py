"""This rank's part of an optimizer batch, and the micro-batches that it becomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper_lightning.policy.packing import Phase, TrajectoryBatch, collate, openings_of
from freshper_lightning.policy.rows import micro_batches_of
from freshper_lightning.replay import Draw
from freshper_lightning.trajectory import Trajectory

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks."""


@dataclass(slots=True)
class OptimizerBatch:
    """The micro-batches of one update on this rank, and the draw that they come from."""

    micro_batches: list[TrajectoryBatch]
    draw: Draw | None = None
    """None for fresh data, and in an update that is skipped."""
    effective_draw: float = 0.0
    """Effective number of distinct trajectories in the draw, over all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """This rank's part of an optimizer batch: ``n`` trajectories, and how many it counts for."""

    phase: Phase
    ids: Ids
    items: Sequence[Trajectory]
    weights: Floats
    ages: Floats
    multiplicities: Floats
    sequences: float
    draw: Draw | None = None

    @classmethod
    def fresh(cls, ids: Ids, items: Sequence[Trajectory], ages: Floats) -> "Part":
        """Trajectories of weight 1."""
        return cls("fresh", ids, items, np.ones(len(ids)), ages, np.ones(len(ids)), float(len(ids)))

    @classmethod
    def drawn(cls, draw: Draw | None, requested: int) -> "Part":
        """Of ``requested`` trajectories; without a draw the update is skipped."""
        if draw is None:
            none = np.empty(0)
            return cls("replay", none.astype(np.int64), (), none, none, none, 0.0)
        items, weights = draw.trajectories, draw.weights
        return cls("replay", draw.ids, items, weights, draw.ages, draw.multiplicities, float(requested), draw)

    def tokens(self) -> float:
        """Sampled tokens, in expectation those of ``sequences`` draws from one buffer."""
        lengths = np.array([item.num_sampled for item in self.items], np.float64)
        return float(lengths @ self.multiplicities)

    def split(self, micro_batches: int, reduce: Reduce, share: bool = False) -> OptimizerBatch:
        """Exactly so many micro-batches of about as many tokens, which may ``share`` openings; a collective."""
        drawn = (0.0, 0.0) if self.draw is None else self.draw.weight_sums()
        sums = reduce(torch.tensor([self.tokens(), self.sequences, *drawn], dtype=torch.float64)).tolist()
        batches = []
        openings = openings_of(self.items) if share else None
        for members in micro_batches_of([item.num_tokens for item in self.items], micro_batches, openings):
            batch = collate(
                [self.items[i] for i in members],
                phase=self.phase,
                importance_weights=torch.from_numpy(self.weights[members]),
                ids=torch.from_numpy(self.ids[members]),
                ages=torch.from_numpy(self.ages[members].astype(np.float64)),
                openings=None if openings is None else [openings[i] for i in members],
            )
            batch.total_tokens, batch.total_sequences = sums[:2]
            batches.append(batch)
        return OptimizerBatch(batches, self.draw, 0.0 if self.draw is None else sums[2] ** 2 / sums[3])
