"""Base priorities: how much there is to learn from a trajectory, apart from its age."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper_lightning.replay.success import SuccessRates, prompt_of
from freshper_lightning.trajectory import Trajectory


class Priority(ABC):
    """What a trajectory is worth at collection: finite and at least 0, where 0 means that it is never drawn.

    A new priority is a frozen dataclass with :meth:`base`; nothing else has to know of it.
    """

    rewritten: ClassVar[bool] = False
    """Whether training measures the priority anew on every visit and writes it back; otherwise collection fixes it."""
    needs_critic: ClassVar[bool] = False
    """Whether the priority only exists where a critic is trained."""
    needs_advantages: ClassVar[bool] = False
    """Whether the priority only exists where collection fixes advantages."""

    @abstractmethod
    def base(self, trajectory: Trajectory) -> float:
        """Priority at collection.

        Raises:
            ValueError: The trajectory lacks what the priority is computed from; nothing is put in its place.
        """

    def bases(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """float64 [n]: :meth:`base` of each, for a priority that is faster over many at once."""
        return np.array([self.base(item) for item in trajectories], np.float64)


@dataclass(frozen=True)
class UniformPriority(Priority):
    """Every trajectory is worth the same; what remains is the decay. Fixed."""

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

    Fixed at collection.
    Source: Ma et al. 2026 (2604.16918), base priority of critic-free training, with eps 1e-6.
    """

    def base(self, trajectory: Trajectory) -> float:
        """``|sum of rewards| + eps``."""
        return abs(_return_of(trajectory)) + self.eps


@dataclass(frozen=True)
class PositiveReward(_OffsetPriority):
    """``max(return, 0) + eps`` of the environment's rewards: failures are not worth a second look.

    Fixed at collection.
    """

    def base(self, trajectory: Trajectory) -> float:
        """``max(sum of rewards, 0) + eps``."""
        episode_return = _return_of(trajectory)
        # Written so that a return that is not a number stays one, and is refused.
        return (0.0 if episode_return < 0 else episode_return) + self.eps


@dataclass(frozen=True)
class AbsoluteAdvantage(_OffsetPriority):
    """Mean of ``|advantage|`` over the sampled tokens, plus eps: long turns count by their length, prompts not at all.

    Advantages are frozen at collection, and so is this priority.
    Source: Ma et al. 2026 (2604.16918), with the mean taken over trained tokens only.
    """

    needs_advantages: ClassVar[bool] = True

    def base(self, trajectory: Trajectory) -> float:
        """``sum_t tokens_t |A_t| / sum_t tokens_t + eps``.

        Raises:
            ValueError: Advantages have not been computed.
        """
        return float(_mean_magnitudes([trajectory])[0]) + self.eps

    def bases(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """All at once, unless a subclass says otherwise what one is worth."""
        if type(self).base is not AbsoluteAdvantage.base or not trajectories:
            return super().bases(trajectories)
        return _mean_magnitudes(trajectories) + self.eps


@dataclass(frozen=True)
class GroupSpread(_OffsetPriority):
    """Standard deviation of the training returns in the trajectory's group, plus eps: 0 where all members did alike.

    It is the magnitude of what a group baseline leaves to learn, equal for all members. Fixed at collection.
    """

    def base(self, trajectory: Trajectory) -> float:
        """``group_std + eps``.

        Raises:
            ValueError: The statistics of the group have not been computed.
        """
        if math.isnan(trajectory.group_std):
            raise ValueError(
                f"priority GroupSpread needs the statistics of group {trajectory.group}, which come with its advantages"
            )
        return trajectory.group_std + self.eps


@dataclass(frozen=True)
class TDError(_OffsetPriority):
    """Mean of ``|TD error|`` over the sampled tokens, plus eps; measured by a critic, never guessed. Rewritten.

    The trainer of the critic measures the errors, and hands ``measured`` of them after a visit to
    :meth:`freshper_lightning.replay.ReplayBuffer.update_priorities`. What may be drawn before its first visit needs
    them as ``priorities`` of :meth:`freshper_lightning.replay.ReplayBuffer.add`.
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
            "priority TDError needs a critic, which an algorithm without a value function does not have; with one, hand"
            " the measured priorities to add(); allowed without: UniformPriority, AbsoluteReward, AbsoluteAdvantage"
        )


class RatePriority(_OffsetPriority):
    """A priority that depends on how often the prompt has been solved so far, which the replay buffer counts."""

    @abstractmethod
    def of_rate(self, rate: float) -> float:
        """Priority of a trajectory whose prompt has this running success rate, the trajectory itself included."""

    def base(self, trajectory: Trajectory) -> float:
        """Refused: a trajectory does not know of others.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"priority {type(self).__name__} needs running success rates, which only a replay buffer has")


@dataclass(frozen=True)
class Learnability(RatePriority):
    """``p (1 - p) + eps``, where p is the running success rate of the prompt (task and seed): greatest at one half.

    Fixed at collection, by the rate at that time; the rates are part of the buffer's state.
    Source: Tzannetos et al. 2023 (2304.12877); Foster et al. 2025 (2502.12272) for language models.
    """

    def of_rate(self, rate: float) -> float:
        """``rate (1 - rate) + eps``."""
        return rate * (1 - rate) + self.eps


@dataclass(frozen=True)
class CustomPriority(Priority):
    """Whatever a function of the trajectory returns. Fixed at collection.

    Raises:
        ValueError: There is no such function.
    """

    path: str
    """Where to import the function from: ``package.module.function``."""
    _function: Callable[[Trajectory], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_function", _imported(self.path))

    def base(self, trajectory: Trajectory) -> float:
        """What the function returns.

        Raises:
            ValueError: That is not a number.
        """
        found = self._function(trajectory)
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the priority {self.path} must return a number, not {found!r}") from error


def bases_of(
    priority: Priority, trajectories: Sequence[Trajectory], known: SuccessRates, later: SuccessRates
) -> NDArray[np.float64]:
    """float64 [n]: base priorities at collection.

    Args:
        priority: What to evaluate.
        trajectories: What has been collected.
        known: Success rates before.
        later: Success rates of ``trajectories`` alone.

    Raises:
        ValueError: A trajectory lacks what the priority needs, or its priority is not finite or below 0; or there
            is not one for each.
    """
    if isinstance(priority, RatePriority):
        values = np.array([priority.of_rate(known.rate(prompt_of(item), later)) for item in trajectories], np.float64)
    else:
        values = np.asarray(priority.bases(trajectories), np.float64)
        if values.shape != (len(trajectories),):
            allowed = f"one number for each of {len(trajectories)} trajectories"
            raise ValueError(f"bases of {priority} must return {allowed}, not {values.shape}")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        item, base = trajectories[wrong[0]], float(values[wrong[0]])
        name = f"{priority} of member {item.member} of group {item.group}"
        raise ValueError(f"{name} must be finite and at least 0, not {base!r}")
    return values


def _imported(path: str) -> Callable[[Trajectory], float]:
    module, _, name = path.rpartition(".")
    try:
        function: Callable[[Trajectory], float] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"path must be package.module.function of a function to import, not {path!r}") from error
    if not callable(function):
        raise ValueError(f"path must name a function, not {function!r}, which is what {path!r} is")
    return function


def _mean_magnitudes(trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    """float64 [n]: mean of ``|advantage|`` over the sampled tokens of each; of at least one trajectory."""
    lacking = next((item for item in trajectories if item.advantages is None), None)
    if lacking is not None:
        raise ValueError(f"trajectory {lacking.member} of group {lacking.group} has no advantages yet")
    advantages = [item.advantages for item in trajectories if item.advantages is not None]
    bounds = torch.cat([item.turns for item in trajectories]).numpy(force=True)
    tokens, owner = bounds[:, 1] - bounds[:, 0], np.repeat(np.arange(len(advantages)), [a.numel() for a in advantages])
    weighted = tokens * np.abs(torch.cat(advantages).double().numpy(force=True))
    means: NDArray[np.float64] = np.bincount(owner, weighted) / np.bincount(owner, tokens)
    return means


def _return_of(trajectory: Trajectory) -> float:
    """The episode's return, added up in Python, which for a handful of turns is faster than a tensor operation."""
    return float(sum(trajectory.rewards.tolist()))
