"""TD errors of a critic as priorities: at collection, and after each visit."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.policy.preparation import errors_under_critic
from freshper_lightning.replay import TDError
from freshper_lightning.trajectory import Trajectory


def priorities_at_collection(
    module: PolicyModule, priority: TDError, trajectories: Sequence[Trajectory]
) -> NDArray[np.float64]:
    """float64 [n]: base priorities by the present critic, which takes forward passes of its own; a collective."""
    return np.array([priority.measured(errors) for errors in errors_under_critic(module, trajectories)], np.float64)


def priorities_of_visit(priority: TDError, batch: TrajectoryBatch) -> list[float]:
    """Base priority of each trajectory of a micro-batch, by the critic that its epoch was prepared with.

    Raises:
        ValueError: No critic has seen the batch.
    """
    if batch.td_errors is None:
        raise ValueError(f"priority {priority} needs TD errors, but no critic has seen the {batch.phase} batch")
    return [priority.measured(errors) for errors in batch.td_errors.split(batch.lengths.tolist())]
