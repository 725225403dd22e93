"""Algorithms: configuration, and which pure functions it selects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from freshper_lightning.algorithms.advantages import BASELINES, Baseline, Reduce, compute_advantages
from freshper_lightning.algorithms.base import Algorithm, Scorer
from freshper_lightning.algorithms.checks import check_choice, check_inputs, check_range
from freshper_lightning.algorithms.inputs import LossInputs, LossOutput
from freshper_lightning.algorithms.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    Aggregation,
    KLEstimator,
    aggregation_coefficients,
    clipped_surrogate,
    clipped_weight_surrogate,
    k3,
    kl_loss,
    weighted_loss,
    weighted_surrogate,
)
from freshper_lightning.algorithms.ratios import (
    LEVELS,
    WEIGHT_BOUNDS,
    Level,
    WeightBound,
    bounded_weights,
    importance_ratio,
    negative_drift,
    policy_ratio,
    second_moment_outliers,
)
from freshper_lightning.trajectory import Trajectory

Correction = Literal["bypass", "decoupled", "importance_sampling"]
"""How the loss answers for the behavior policy: in the surrogate's ratio, by a weight beside it, or by a weight alone.

``bypass`` bounds the ratio current / behavior. ``decoupled`` bounds the ratio current / proximal and multiplies by a
weight proximal / behavior (arXiv:2505.24298). ``importance_sampling`` multiplies the plain policy gradient by a weight
current / behavior. Never two of them at once.
"""

CORRECTIONS: tuple[str, ...] = get_args(Correction)

Surrogate = Literal["clip", "cispo", "second_moment"]
"""How the ratio of a surrogate is bounded: PPO's clip, CISPO's clipped weight, or M2PO's second moment."""

SURROGATES: tuple[str, ...] = get_args(Surrogate)

Place = Literal["loss", "reward"]
"""Where the KL term is: in the loss at every update, or in the reward, once, at collection."""

PLACES: tuple[str, ...] = get_args(Place)

_SURROGATE_KEYS = ("surrogate", "level", "clip", "clip_high", "dual_clip", "second_moment")
_WEIGHT_KEYS = ("weight_level", "weight_bound", "weight_cap", "weight_floor", "weight_negative_only")
_KL_KEYS = ("kl_in", "kl_estimator", "kl_ratio")
_READERS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (_SURROGATE_KEYS, "correction", ("bypass", "decoupled")),
    (_WEIGHT_KEYS, "correction", ("decoupled", "importance_sampling")),
    (("clip", "clip_high"), "surrogate", ("clip", "cispo")),
    (("dual_clip",), "surrogate", ("clip",)),
    (("second_moment",), "surrogate", ("second_moment",)),
    (("level",), "surrogate", ("clip", "cispo")),
    (("weight_floor",), "weight_bound", ("mask",)),
    (("aggregation_length",), "aggregation", ("constant",)),
    (("kl_ratio",), "kl_in", ("loss",)),
)
"""Keys, and the choices of another key under which they mean something."""


@dataclass(frozen=True)
class Reinforce(Algorithm):
    """Policy gradient on stored advantages, with one correction for the behavior policy.

    Which paper is which setting is in docs/losses.md. The defaults are REINFORCE++ (arXiv:2501.03262) under PPO's clip
    on the ratio to the engine's log-probability at sampling; FreshPER (arXiv:2604.16918) sets ``baseline: mean_std``
    and an ``advantage_clip``.

    Raises:
        ValueError: A setting is out of range, or has no meaning under the other choices.
    """

    baseline: Baseline = "none"
    """What is subtracted from a return: ``none``, the group's ``mean``, ``mean_std`` to divide as well, or the mean of
    the other members (``leave_one_out``)."""
    whiten: bool = True
    """Whether advantages get mean 0 and variance 1 over all sampled tokens of a collection."""
    advantage_clip: float | None = None
    """Largest absolute advantage, applied last."""
    group_filter: float | None = None
    """Groups whose returns have at most this standard deviation are dropped; the number of batches stays."""
    correction: Correction = "bypass"
    """``bypass``, ``decoupled`` or ``importance_sampling``: how the loss answers for the behavior policy."""
    surrogate: Surrogate = "clip"
    """``clip``, ``cispo`` or ``second_moment``: how the ratio is bounded under ``bypass`` and ``decoupled``."""
    level: Level = "token"
    """Ratio of the surrogate: of a ``token``, its ``sequence``, or the ``geometric`` mean over it."""
    clip: float = 0.2
    """Distance below 1 (and above, unless ``clip_high`` is given) at which the ratio is clipped; at most 1."""
    clip_high: float | None = None
    """Distance above 1 at which the ratio is clipped."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1; 3 is usual."""
    second_moment: float = 0.04
    """Largest mean of squared log-ratios of a conversation under ``second_moment``."""
    weight_level: Level = "token"
    """Weight of ``decoupled`` and ``importance_sampling``: of a ``token``, its ``sequence``, or ``geometric`` mean."""
    weight_bound: WeightBound = "truncate"
    """``truncate`` caps a weight, ``mask`` sets it to 0 outside of ``weight_floor`` and ``weight_cap``."""
    weight_cap: float = 2.0
    """Largest weight, at least 1."""
    weight_floor: float = 0.0
    """Smallest weight that ``mask`` lets pass, at most 1."""
    weight_negative_only: bool = False
    """Whether positive advantages take weight 1."""
    negative_mask: float | None = None
    """Negative advantages of conversations whose mean log(behavior / current) is above this are masked; 0.5 is mild."""
    aggregation: Aggregation = "token_mean"
    """``token_mean``, ``sequence_mean`` (of token means), ``sequence_sum`` (mean of token sums) or ``constant`` (mean
    of token sums over ``aggregation_length``)."""
    aggregation_length: float | None = None
    """Divisor of ``constant``: the most tokens that a trajectory can have sampled."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence to the reference policy."""
    kl_in: Place = "loss"
    """``loss`` or ``reward``."""
    kl_estimator: KLEstimator = "k3"
    """``k2`` or ``k3`` in the loss, ``k1`` in the reward."""
    kl_ratio: bool = True
    """Whether the KL term of a token is weighted by current / behavior, as samples of an older policy ask for, and the
    gradient of k3 on any."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        for keys, choice, readers in _READERS:
            if getattr(self, choice) not in readers:
                self._refuse_unread(keys, choice)
        if self.aggregation == "constant" and self.aggregation_length is None:
            raise ValueError("aggregation_length must be above 0 and finite with aggregation 'constant', not None")
        estimators = ("k1",) if self.kl_in == "reward" else ("k2", "k3")
        if self.kl_estimator not in estimators:
            raise ValueError(
                f"kl_estimator must be {' or '.join(estimators)} where kl_in is {self.kl_in!r}, not"
                f" {self.kl_estimator!r}: k1 has no gradient as a loss, and a reward needs an unbiased value"
            )
        if self.kl_coefficient == 0:
            self._refuse_unread(_KL_KEYS, "kl_coefficient")

    def _check_choices(self) -> None:
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("correction", self.correction, CORRECTIONS)
        check_choice("surrogate", self.surrogate, SURROGATES)
        check_choice("level", self.level, LEVELS)
        check_choice("weight_level", self.weight_level, LEVELS)
        check_choice("weight_bound", self.weight_bound, WEIGHT_BOUNDS)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("kl_in", self.kl_in, PLACES)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        for key in ("whiten", "weight_negative_only", "kl_ratio"):
            check_choice(key, getattr(self, key), (True, False))

    def _check_ranges(self) -> None:
        check_range("advantage_clip", self.advantage_clip, above=0.0)
        check_range("group_filter", self.group_filter, least=0.0)
        check_range("clip", self.clip, above=0.0, most=1.0)
        check_range("clip_high", self.clip_high, above=0.0)
        check_range("dual_clip", self.dual_clip, above=1.0)
        check_range("second_moment", self.second_moment, above=0.0)
        check_range("weight_cap", self.weight_cap, least=1.0)
        check_range("weight_floor", self.weight_floor, least=0.0, most=1.0)
        check_range("negative_mask", self.negative_mask, least=0.0)
        check_range("aggregation_length", self.aggregation_length, above=0.0)
        check_range("entropy_coefficient", self.entropy_coefficient, least=0.0)
        check_range("kl_coefficient", self.kl_coefficient, least=0.0)

    def _refuse_unread(self, keys: Sequence[str], choice: str) -> None:
        for key in keys:
            value, unset = getattr(self, key), getattr(Reinforce, key)
            if value != unset:
                allowed = "null" if unset is None else unset
                raise ValueError(f"{key} is {value}, but {choice} {getattr(self, choice)!r} allows only {allowed}")

    def needs_reference(self) -> bool:
        """Whether there is a KL term in the loss."""
        return self.kl_coefficient > 0 and self.kl_in == "loss"

    def needs_reference_at_collection(self) -> bool:
        """Whether there is a KL term in the reward."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    def needs_proximal(self) -> bool:
        """Whether the correction is decoupled."""
        return self.correction == "decoupled"

    def needs_entropy(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.entropy_coefficient > 0

    def coefficients(self, segments: Tensor, lengths: Tensor, total_tokens: float, total_sequences: float) -> Tensor:
        """See :func:`freshper_lightning.algorithms.losses.aggregation_coefficients`."""
        totals = (total_tokens, total_sequences)
        return aggregation_coefficients(self.aggregation, segments, lengths, *totals, self.aggregation_length)

    def advantages(
        self, trajectories: Sequence[Trajectory], reduce: Reduce, reference: Scorer | None = None
    ) -> list[Trajectory]:
        """See :func:`freshper_lightning.algorithms.advantages.compute_advantages`.

        A KL term in the reward takes kl_coefficient x the sum over the episode's tokens of log(behavior / reference)
        (k1) off its return.
        """

        def penalty(kept: Sequence[Trajectory]) -> Tensor:
            if reference is None:
                raise ValueError(f"kl_coefficient is {self.kl_coefficient} in the reward, but there is no reference")
            scored = zip(kept, reference(kept), strict=True)
            sums = [float((item.behavior_log_probs.double() - log_probs).sum()) for item, log_probs in scored]
            return self.kl_coefficient * torch.tensor(sums, dtype=torch.float64)

        return compute_advantages(
            trajectories,
            reduce,
            baseline=self.baseline,
            whiten=self.whiten,
            clip=self.advantage_clip,
            group_filter=self.group_filter,
            penalty=penalty if self.needs_reference_at_collection() else None,
        )

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Minus the surrogate, minus the entropy bonus, plus the KL term, each token under its importance weight.

        Metrics per token: ``ratio`` (of current to behavior as the surrogate has it; to proximal under ``decoupled``),
        ``log_ratio`` (of current to behavior, as it is), ``weight`` (of the correction, where it has one), ``clipped``
        (1 where a bound or a mask acted), ``kl_behavior`` (KL(behavior || current) by k3), ``surrogate``, and
        ``kl_reference`` (KL(current || reference) by k3) and ``entropy`` where they are given. The entropy is taken at
        tokens of the behavior policy without a correction for it.
        """
        inputs = inputs.with_constants()
        check_inputs(inputs)
        self._check_needs(inputs)
        token_loss, metrics = self._token_loss(inputs)
        loss = weighted_loss(token_loss, inputs.coefficients, inputs.importance_weights)
        return LossOutput(loss, detached(metrics))

    def _token_loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [S] and metrics of each token, without weights."""
        log_ratio = inputs.log_probs - inputs.behavior_log_probs
        metrics = self._policy_term(inputs, log_ratio)
        metrics |= {"log_ratio": log_ratio, "kl_behavior": k3(log_ratio)}
        token_loss = -metrics["surrogate"]
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        if inputs.reference_log_probs is not None:
            metrics["kl_reference"] = k3(inputs.reference_log_probs - inputs.log_probs)
        if inputs.entropy is not None and self.needs_entropy():
            token_loss = token_loss - self.entropy_coefficient * inputs.entropy
        if inputs.reference_log_probs is not None and self.kl_coefficient > 0 and self.kl_in == "loss":
            ratio = importance_ratio(log_ratio) if self.kl_ratio else None
            divergence = kl_loss(inputs.log_probs, inputs.reference_log_probs, self.kl_estimator, ratio)
            token_loss = token_loss + self.kl_coefficient * divergence
        return token_loss, metrics

    def _check_needs(self, inputs: LossInputs) -> None:
        if self.needs_entropy() and inputs.entropy is None:
            raise ValueError(f"entropy_coefficient is {self.entropy_coefficient}, but the inputs have no entropy")
        if self.needs_reference() and inputs.reference_log_probs is None:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}, but the inputs have no reference_log_probs")
        if self.needs_proximal() and inputs.proximal_log_probs is None:
            raise ValueError(f"correction is {self.correction!r}, but the inputs have no proximal_log_probs")

    def _policy_term(self, inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
        """``surrogate``, ``ratio``, ``clipped`` and, where the correction has one, ``weight`` of each token."""
        proximal = inputs.proximal_log_probs if self.needs_proximal() else None
        if self.correction == "importance_sampling":
            weight, clipped = self._weight(inputs, log_ratio)
            surrogate = weighted_surrogate(inputs.log_probs, weight, inputs.advantages)
            ratio, metrics = importance_ratio(log_ratio), {"weight": weight}
        else:
            to_bound = log_ratio if proximal is None else inputs.log_probs - proximal
            ratio = policy_ratio(to_bound, inputs.segments, inputs.lengths, self.level)
            surrogate, clipped = self._bounded(inputs, to_bound, ratio)
            metrics = {}
        if proximal is not None:
            weight, outside = self._weight(inputs, proximal - inputs.behavior_log_probs)
            surrogate, clipped = weight * surrogate, clipped | outside
            metrics = {"weight": weight}
        if self.negative_mask is not None:
            drift = (log_ratio, inputs.advantages, inputs.segments, inputs.lengths)
            masked = negative_drift(*drift, self.negative_mask)
            surrogate, clipped = surrogate.masked_fill(masked, 0.0), clipped | masked
        return metrics | {"surrogate": surrogate, "ratio": ratio, "clipped": clipped}

    def _weight(self, inputs: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Weight of the correction [S], a constant, and where it is out of bounds."""
        ratio = policy_ratio(log_ratio.detach(), inputs.segments, inputs.lengths, self.weight_level)
        weight, outside = bounded_weights(ratio, self.weight_bound, self.weight_floor, self.weight_cap)
        if self.weight_negative_only:
            positive = inputs.advantages > 0
            weight, outside = weight.masked_fill(positive, 1.0), outside & ~positive
        return weight, outside

    def _bounded(self, inputs: LossInputs, log_ratio: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """The surrogate of a bounded ratio [S], and where it is bounded."""
        high = self.clip if self.clip_high is None else self.clip_high
        if self.surrogate == "clip":
            return clipped_surrogate(ratio, inputs.advantages, self.clip, high, self.dual_clip)
        if self.surrogate == "cispo":
            return clipped_weight_surrogate(inputs.log_probs, ratio, inputs.advantages, self.clip, high)
        tokens = (log_ratio, inputs.advantages, inputs.segments, inputs.lengths)
        outliers = second_moment_outliers(*tokens, self.second_moment)
        return (ratio * inputs.advantages).masked_fill(outliers, 0.0), outliers


@dataclass(frozen=True)
class GRPO(Reinforce):
    """:class:`Reinforce` whose defaults are the group-relative advantages of GRPO (arXiv:2402.03300), not whitened.

    The paper's loss is ``aggregation: sequence_mean`` with ``kl_coefficient: 0.04`` and ``kl_ratio: false``.
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

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """``token_mean``, ``sequence_mean`` (of token means) or ``sequence_sum`` (mean of token sums)."""

    def __post_init__(self) -> None:
        check_choice("aggregation", self.aggregation, ("token_mean", "sequence_mean", "sequence_sum"))

    def coefficients(self, segments: Tensor, lengths: Tensor, total_tokens: float, total_sequences: float) -> Tensor:
        """See :func:`freshper_lightning.algorithms.losses.aggregation_coefficients`."""
        return aggregation_coefficients(self.aggregation, segments, lengths, total_tokens, total_sequences)

    def advantages(
        self, trajectories: Sequence[Trajectory], reduce: Reduce, reference: Scorer | None = None
    ) -> list[Trajectory]:
        """Advantage 1 for every turn: maximum likelihood takes all demonstrations alike."""
        return [
            trajectory.with_advantages(torch.ones(trajectory.num_turns), trajectory.group_mean, trajectory.group_std)
            for trajectory in trajectories
        ]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Minus the log-probability of each token; metrics are ``surrogate`` (it), and ``entropy`` where given."""
        check_inputs(inputs)
        metrics = {"surrogate": inputs.log_probs}
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy
        loss = weighted_loss(-inputs.log_probs, inputs.coefficients, inputs.importance_weights)
        return LossOutput(loss, detached(metrics))


def detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as float32 without a graph."""
    return {name: values.detach().float() for name, values in metrics.items()}
