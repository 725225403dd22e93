"""Two controls for comparisons, named by import path in configs/methods: they do on purpose what the product avoids."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.advantages import group_advantages, group_statistics, outcomes
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.replay import NoDecay
from freshper_lightning.trajectory import Trajectory


class NullReplay(ReplayDataModule):
    """Every replay update steps on a loss of exactly 0: Adam moves on along its momentum, and plain SGD stays.

    Draws are those of replay, and their importance weights are 0, so that steps, schedule and time are those of an arm
    with replay. What such steps do alone is what this control shows.
    """

    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """As in replay, with weights of 0 for what is replayed."""
        batches = super().optimizer_batch(update)
        for batch in batches:
            if batch.phase == "replay":
                batch.importance_weights.zero_()
        return batches


class PublishedReplay(ReplayDataModule):
    """Replay as the code published with FreshPER (arXiv:2604.16918) does it, in three respects.

    - Advantages of a replay batch are computed anew from the returns in it, group by group (``mean_std``): a
      trajectory drawn without others of its group has advantage 0, and so has one that is drawn twice.
    - Every trajectory comes in with priority 1, whatever it is worth. With a decay, the refresh of the next iteration
      gives it its own; without one nothing ever does, so that prioritized replay is uniform replay.
    - Priorities are never written back after training.

    The fourth and the fifth, age in iterations and a learning-rate schedule of as many steps as there are fresh
    updates, are settings: see configs/methods/published.yaml. Everything else is as in the product, on one rank.
    """

    def add_fresh(self, trajectories: list[Trajectory]) -> None:
        """Refresh the priorities of the last iteration, then add the new one at the start value."""
        if not isinstance(self.buffer.decay, NoDecay):
            worth = [self.buffer.priority.base(trajectory) for trajectory in self.fresh()]
            self.buffer.update_priorities(self._fresh, worth)
        super().add_fresh(trajectories)

    def _bases(self, trajectories: list[Trajectory]) -> NDArray[np.float64]:
        return np.ones(len(trajectories))

    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """As in replay, with the advantages of what is replayed replaced."""
        batches = super().optimizer_batch(update)
        if self.last_draw is not None:
            advantages = batch_advantages(self.last_draw.trajectories)
            _replace_advantages(batches, self.last_draw.ids, advantages)
        return batches


def batch_advantages(drawn: Sequence[Trajectory]) -> Tensor:
    """Float64 [n]: returns against those of the same group in the batch, over their deviation; 0 where it is 0."""
    returns, groups = outcomes(drawn)
    mean, std = group_statistics(returns, groups)
    return group_advantages(returns, mean, std, 0, "mean_std")


def _replace_advantages(batches: Sequence[TrajectoryBatch], ids: NDArray[np.int64], advantages: Tensor) -> None:
    by_id = dict(zip(ids.tolist(), advantages.tolist(), strict=True))
    for batch in batches:
        own = torch.tensor([by_id[index] for index in batch.ids.tolist()], dtype=torch.float32)
        batch.advantages = own[batch.segments]
