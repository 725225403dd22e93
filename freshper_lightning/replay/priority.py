"""Base priorities: how much there is to learn from a trajectory, apart from its age."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freshper_lightning.trajectory import Trajectory


class Priority(ABC):
    """What a trajectory is worth at collection: finite and at least 0, where 0 means that it is never drawn.

    A new priority is a frozen dataclass with :meth:`base`; nothing else has to know of it.
    """

    rewritten: ClassVar[bool] = False
    """Whether training measures the priority anew on every visit and writes it back."""
    needs_critic: ClassVar[bool] = False
    """Whether the priority only exists where a critic is trained."""

    @abstractmethod
    def base(self, trajectory: Trajectory) -> float:
        """Priority at collection.

        Raises:
            ValueError: The trajectory lacks what the priority is computed from; nothing is put in its place.
        """


@dataclass(frozen=True)
class UniformPriority(Priority):
    """Every trajectory is worth the same; what remains is the decay."""

    def base(self, trajectory: Trajectory) -> float:
        """Always 1."""
        return 1.0


@dataclass(frozen=True)
class _OffsetPriority(Priority):
    eps: float = 1e-6
    """Added to the magnitude; 0 makes trajectories of magnitude 0 impossible to draw."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be finite and at least 0, not {self.eps}")


@dataclass(frozen=True)
class AbsoluteReward(_OffsetPriority):
    """``|return| + eps`` of the environment's rewards alone: a format penalty never makes a trajectory interesting.

    Source: Ma et al. 2026 (2604.16918), base priority of critic-free training, with eps 1e-6.
    """

    def base(self, trajectory: Trajectory) -> float:
        """``|sum of rewards| + eps``."""
        return abs(trajectory.episode_return) + self.eps


@dataclass(frozen=True)
class AbsoluteAdvantage(_OffsetPriority):
    """Mean of ``|advantage|`` over the sampled tokens, plus eps: long turns count by their length, prompts not at all.

    Advantages are frozen at collection, and so is this priority.
    Source: Ma et al. 2026 (2604.16918), with the mean taken over trained tokens only.
    """

    def base(self, trajectory: Trajectory) -> float:
        """``sum_t tokens_t |A_t| / sum_t tokens_t + eps``.

        Raises:
            ValueError: Advantages have not been computed.
        """
        return float(trajectory.token_advantages().double().abs().mean()) + self.eps


@dataclass(frozen=True)
class TDError(_OffsetPriority):
    """Mean of ``|TD error|`` over the sampled tokens, plus eps; measured by a critic, never guessed.

    The trainer of the critic measures the errors of what it visits and hands ``measured`` to
    :meth:`freshper_lightning.replay.ReplayBuffer.update_priorities`.
    Source: Schaul et al. 2016 (1511.05952), section 3.3, proportional variant.
    """

    rewritten: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True

    def measured(self, errors: Tensor) -> float:
        """Priority that follows from the TD errors [S] of a trajectory's sampled tokens."""
        return float(errors.double().abs().mean()) + self.eps

    def base(self, trajectory: Trajectory) -> float:
        """Refused: a trajectory carries no TD errors.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "priority TDError needs a critic, which an algorithm without a value function does not have; "
            "allowed without one: UniformPriority, AbsoluteReward, AbsoluteAdvantage"
        )
