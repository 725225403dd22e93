"""Small trajectories for the tests of this folder."""

import torch
from torch import Tensor

from freshper_lightning.trajectory import ClockReading, Trajectory


def episode(group: int, member: int, score: float, lengths: tuple[int, ...] = (1,), penalty: float = 0.0) -> Trajectory:
    """An episode whose turns have the sampled ``lengths``, one prompt token before each, and a reward at the end."""
    ends = (torch.tensor(lengths) + 1).cumsum(0)
    turns = torch.stack([ends - torch.tensor(lengths), ends], dim=1).int()
    rewards = torch.zeros(len(lengths))
    rewards[-1] = score
    return Trajectory(
        token_ids=torch.arange(int(ends[-1]), dtype=torch.int32),
        turns=turns,
        behavior_log_probs=torch.full((sum(lengths),), -0.5),
        rewards=rewards,
        weight_versions=torch.zeros(len(lengths), dtype=torch.int64),
        born=ClockReading(),
        group=group,
        member=member,
        seed=group,
        task="test",
        format_penalty=penalty,
    )


def alone(tensor: Tensor) -> Tensor:
    """The sum over one rank."""
    return tensor
