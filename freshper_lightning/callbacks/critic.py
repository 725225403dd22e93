"""TD errors of a critic as priorities: at collection, and after each visit."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from datamodules.replay import ReplayDataModule
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.policy.preparation import errors_under_critic
from freshper_lightning.replay import TDError
from freshper_lightning.trajectory import Trajectory


def priorities_at_collection(
    module: PolicyModule, priority: TDError, trajectories: Sequence[Trajectory], visited_first: bool
) -> NDArray[np.float64]:
    """float64 [n]: base priorities of new trajectories.

    Where fresh updates visit them ahead of any draw (``visited_first``) it is 1 until they do. Otherwise it is measured
    by the present critic, which takes forward passes of its own; a collective.
    """
    if visited_first:
        return np.ones(len(trajectories))
    return np.array([priority.measured(errors) for errors in errors_under_critic(module, trajectories)], np.float64)


def priorities_of_visit(priority: TDError, batch: TrajectoryBatch) -> list[float]:
    """Base priority of each trajectory of a micro-batch, by the critic that its epoch was prepared with.

    Raises:
        ValueError: No critic has seen the batch.
    """
    if batch.td_errors is None:
        raise ValueError(f"priority {priority} needs TD errors, but no critic has seen the {batch.phase} batch")
    return [priority.measured(errors) for errors in batch.td_errors.split(batch.lengths.tolist())]


class Visits:
    """Base priorities by the TD errors of an optimizer batch, which reach the buffer once all of it has been visited.

    Nothing is kept where the priority is another one.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._priorities: list[float] = []

    def add(self, data: ReplayDataModule, batch: TrajectoryBatch) -> None:
        """Take in a micro-batch.

        Raises:
            ValueError: No critic has seen it.
        """
        priority = data.buffer.priority
        if isinstance(priority, TDError) and not batch.is_filler:
            self._ids += batch.ids.tolist()
            self._priorities += priorities_of_visit(priority, batch)

    def write_back(self, data: ReplayDataModule) -> None:
        """Rewrite the priorities of what was visited since the last call, whether or not the update was applied."""
        if self._ids:
            data.buffer.update_priorities(self._ids, self._priorities)
        self._ids, self._priorities = [], []
