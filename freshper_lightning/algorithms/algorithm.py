"""Algorithms: configuration, and which pure functions it selects."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from freshper_lightning.algorithms.advantages import BASELINES, Baseline, Reduce, compute_advantages
from freshper_lightning.algorithms.inputs import LossInputs, LossOutput
from freshper_lightning.algorithms.losses import (
    AGGREGATIONS,
    Aggregation,
    clipped_surrogate,
    importance_ratio,
    k3,
    truncated_surrogate,
    weighted_loss,
)
from freshper_lightning.trajectory import Trajectory

Correction = Literal["clip", "truncate"]
"""What bounds the ratio of current to behavior probability: PPO's clip or a truncated weight, never both."""

CORRECTIONS: tuple[str, ...] = get_args(Correction)


class Algorithm(ABC):
    """Turns trajectories into advantages and log-probabilities into a loss; holds settings and no state."""

    needs_rollouts: ClassVar[bool] = True
    """Whether it learns from its own samples, so that an engine has to be there."""
    needs_critic: ClassVar[bool] = False
    """Whether it reads a value head."""

    @property
    @abstractmethod
    def aggregation(self) -> Aggregation:
        """How token losses are summed over an optimizer batch."""

    def needs_reference(self) -> bool:
        """Whether the loss reads ``reference_log_probs``."""
        return False

    def needs_entropy(self) -> bool:
        """Whether the loss reads ``entropy`` and its gradient."""
        return False

    @abstractmethod
    def advantages(self, trajectories: Sequence[Trajectory], reduce: Reduce) -> list[Trajectory]:
        """The trajectories, whole groups, with their advantages; called once, at collection, on every rank.

        ``reduce`` sums a float64 tensor over ranks.
        """

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's share of the loss to minimise.

        Importance weights of prioritized replay multiply every term of a token alike, since they stand for how often
        its trajectory was drawn.

        Raises:
            ValueError: A tensor that the settings ask for is missing, or shapes differ.
        """


@dataclass(frozen=True)
class Reinforce(Algorithm):
    """Policy gradient on stored advantages, with one correction of the ratio to the behavior policy.

    The ratio is taken to the log-probability of the engine at sampling, and nothing else multiplies it. The defaults
    are REINFORCE++ (arXiv:2501.03262); FreshPER (arXiv:2604.16918) sets ``baseline: mean_std`` and an
    ``advantage_clip``.

    Raises:
        ValueError: A setting is out of range, or has no meaning under the chosen correction.
    """

    baseline: Baseline = "none"
    """What is subtracted from a return: ``none``, the group's ``mean``, or ``mean_std`` to divide as well."""
    whiten: bool = True
    """Whether advantages get mean 0 and variance 1 over all sampled tokens of a collection."""
    advantage_clip: float | None = None
    """Largest absolute advantage, applied last."""
    correction: Correction = "clip"
    """``clip`` for PPO's clip, ``truncate`` for a truncated importance weight."""
    clip: float = 0.2
    """Distance below 1 (and above, unless ``clip_high`` is given) at which the ratio is clipped."""
    clip_high: float | None = None
    """Distance above 1 at which the ratio is clipped (arXiv:2503.14476)."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative (arXiv:1912.09729), above 1; 3 is usual."""
    truncation: float = 2.0
    """Largest importance weight of a token under ``truncate``."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``, ``sequence_mean`` (of token means) or ``sequence_sum`` (mean of token sums)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence to the reference policy, estimated per token by k3."""

    def __post_init__(self) -> None:
        _check_choice("baseline", self.baseline, BASELINES)
        _check_choice("whiten", self.whiten, (True, False))
        _check_choice("correction", self.correction, CORRECTIONS)
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)
        _check_range("advantage_clip", self.advantage_clip, above=0.0)
        _check_range("clip", self.clip, above=0.0, below=1.0)
        _check_range("clip_high", self.clip_high, above=0.0)
        _check_range("dual_clip", self.dual_clip, above=1.0)
        _check_range("truncation", self.truncation, least=1.0)
        _check_range("entropy_coefficient", self.entropy_coefficient, least=0.0)
        _check_range("kl_coefficient", self.kl_coefficient, least=0.0)
        for key in ("clip_high", "dual_clip"):
            if self.correction == "truncate" and getattr(self, key) is not None:
                raise ValueError(f"{key} is {getattr(self, key)}, but correction 'truncate' allows only null")

    def needs_reference(self) -> bool:
        """Whether there is a KL term."""
        return self.kl_coefficient > 0

    def needs_entropy(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.entropy_coefficient > 0

    def advantages(self, trajectories: Sequence[Trajectory], reduce: Reduce) -> list[Trajectory]:
        """See :func:`freshper_lightning.algorithms.advantages.compute_advantages`."""
        return compute_advantages(
            trajectories, reduce, baseline=self.baseline, whiten=self.whiten, clip=self.advantage_clip
        )

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Minus the surrogate, minus the entropy bonus, plus the KL term, each token under its importance weight.

        Metrics per token: ``ratio`` (clamped as in the loss), ``log_ratio`` (as it is), ``clipped`` (1 where the clip
        took the gradient, or where the weight was truncated), ``kl_behavior`` (KL(behavior || current) by k3),
        ``surrogate``, and ``kl_reference`` (KL(current || reference) by k3) and ``entropy`` where they are given. KL
        and entropy are taken at tokens of the behavior policy without a correction for it.
        """
        _check_inputs(inputs)
        self._check_needs(inputs)
        log_ratio = inputs.log_probs - inputs.behavior_log_probs
        ratio = importance_ratio(log_ratio)
        surrogate, clipped = self._surrogate(inputs, ratio)
        metrics = {
            "ratio": ratio,
            "log_ratio": log_ratio,
            "clipped": clipped,
            "kl_behavior": k3(log_ratio),
            "surrogate": surrogate,
        }
        token_loss = -surrogate
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        if inputs.reference_log_probs is not None:
            metrics["kl_reference"] = k3(inputs.reference_log_probs - inputs.log_probs)
        if self.needs_entropy():
            token_loss = token_loss - self.entropy_coefficient * metrics["entropy"]
        if self.needs_reference():
            token_loss = token_loss + self.kl_coefficient * metrics["kl_reference"]
        loss = weighted_loss(token_loss, inputs.coefficients, inputs.importance_weights)
        return LossOutput(loss, _detached(metrics))

    def _check_needs(self, inputs: LossInputs) -> None:
        if self.needs_entropy() and inputs.entropy is None:
            raise ValueError(f"entropy_coefficient is {self.entropy_coefficient}, but the inputs have no entropy")
        if self.needs_reference() and inputs.reference_log_probs is None:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}, but the inputs have no reference_log_probs")

    def _surrogate(self, inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor]:
        if self.correction == "truncate":
            return truncated_surrogate(inputs.log_probs, ratio, inputs.advantages, self.truncation)
        high = self.clip if self.clip_high is None else self.clip_high
        return clipped_surrogate(ratio, inputs.advantages, self.clip, high, self.dual_clip)


@dataclass(frozen=True)
class GRPO(Reinforce):
    """:class:`Reinforce` whose defaults are the group-relative advantages of GRPO (arXiv:2402.03300), not whitened.

    The paper's loss is ``aggregation: sequence_mean`` with ``kl_coefficient: 0.04``.
    """

    baseline: Baseline = "mean_std"
    whiten: bool = False


@dataclass(frozen=True)
class SFT(Algorithm):
    """Negative log-likelihood of the tokens marked as sampled; behavior log-probs and returns play no part.

    Raises:
        ValueError: ``aggregation`` is unknown.
    """

    needs_rollouts: ClassVar[bool] = False

    aggregation: Aggregation = "token_mean"
    """``token_mean``, ``sequence_mean`` (of token means) or ``sequence_sum`` (mean of token sums)."""

    def __post_init__(self) -> None:
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)

    def advantages(self, trajectories: Sequence[Trajectory], reduce: Reduce) -> list[Trajectory]:
        """Advantage 1 for every turn: maximum likelihood takes all demonstrations alike."""
        return [
            trajectory.with_advantages(torch.ones(trajectory.num_turns), trajectory.group_mean, trajectory.group_std)
            for trajectory in trajectories
        ]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Minus the log-probability of each token; metrics are ``surrogate`` (it), and ``entropy`` where given."""
        _check_inputs(inputs)
        metrics = {"surrogate": inputs.log_probs}
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        loss = weighted_loss(-inputs.log_probs, inputs.coefficients, inputs.importance_weights)
        return LossOutput(loss, _detached(metrics))


def _check_choice(key: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _check_range(
    key: str, value: float | None, *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> None:
    """Refuse a value that is not finite or outside (above, below) or under ``least``; ``None`` means not set."""
    if value is None or (above < value < below and least <= value):
        return
    low = f"at least {least:g}" if math.isfinite(least) else f"above {above:g}"
    high = "finite" if math.isinf(below) else f"below {below:g}"
    raise ValueError(f"{key} must be {low} and {high}, not {value}")


def _check_inputs(inputs: LossInputs) -> None:
    """Refuse shapes that would broadcast into something else than one number per token."""
    shape = inputs.log_probs.shape
    for field in fields(inputs):
        tensor = getattr(inputs, field.name)
        if tensor is not None and (len(shape) != 1 or tensor.shape != shape):
            raise ValueError(
                f"{field.name} must have the shape [S] of log_probs, {list(shape)}, not {list(tensor.shape)}"
            )


def _detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.detach().float() for name, values in metrics.items()}
