"""The value head of PPO: one number for each state that a token was sampled in."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class CriticSettings:
    """A linear head on the policy's last hidden states, beside the output head, with whose states it shares a pass."""

    detached: bool = False
    """Whether the value loss trains the head alone and leaves the rest of the network to the policy's loss."""


class ValueHead(nn.Module):
    """Values in float32 whatever the precision of the states and whatever autocast says; 0 everywhere at first.

    With weights of 0 the value loss has no gradient into the network at first either. The head is part of checkpoints;
    an engine and an exported model never see it.
    """

    def __init__(self, hidden_size: int, settings: CriticSettings) -> None:
        super().__init__()
        self.settings = settings
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [S] of hidden states [S, H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.detach() if self.settings.detached else hidden
            values: Tensor = self.linear(states.float())
        return values[:, 0]
