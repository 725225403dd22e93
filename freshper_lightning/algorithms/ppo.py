"""Proximal policy optimization with a critic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from freshper_lightning.algorithms.advantages import (
    Reduce,
    check_groups,
    group_statistics,
    informative,
    outcomes,
    whitened,
)
from freshper_lightning.algorithms.algorithm import Reinforce
from freshper_lightning.algorithms.base import Scorer
from freshper_lightning.algorithms.checks import check_choice, check_range
from freshper_lightning.algorithms.inputs import LossInputs, ValueInputs
from freshper_lightning.algorithms.values import ESTIMATORS, Estimates, Estimator, gae, value_loss, vtrace
from freshper_lightning.trajectory import Trajectory


@dataclass(frozen=True)
class PPO(Reinforce):
    """:class:`Reinforce` whose advantages come from a critic, anew for each draw, one for each sampled token.

    Nothing that a critic said is stored with a trajectory: values, advantages and returns are those of the critic at
    the start of the epoch that the trajectory was drawn for, and whitening is over the optimizer batch. The value loss
    joins the policy's under the same aggregation and the same importance weights. The policy term has every choice of
    :class:`Reinforce`.

    Sources: arXiv:1707.06347 (PPO), arXiv:1506.02438 (GAE), arXiv:1802.01561 (V-trace).

    Raises:
        ValueError: A setting is out of range, or has no meaning under the other choices.
    """

    estimator: Estimator = "gae"
    """``gae``, or ``vtrace`` to answer for the behavior policy in advantages and returns as well."""
    gamma: float = 1.0
    """Discount from one sampled token to the next."""
    gae_lambda: float = 0.95
    """Weight of later TD errors; 1 gives the sum of rewards to come, 0 the TD error alone."""
    rho_bar: float = 1.0
    """Bound of a token's ratio in its own error under ``vtrace``."""
    c_bar: float = 1.0
    """Bound of a token's ratio in passing later errors on under ``vtrace``; at most ``rho_bar``."""
    value_coefficient: float = 0.5
    """Weight of the value loss, which is half a squared error."""
    value_clip: float | None = None
    """How far a value may move in an epoch towards its return before it loses its gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_range("gamma", self.gamma, above=0.0, most=1.0)
        check_range("gae_lambda", self.gae_lambda, least=0.0, most=1.0)
        check_range("rho_bar", self.rho_bar, above=0.0)
        check_range("c_bar", self.c_bar, above=0.0, most=self.rho_bar)
        check_range("value_coefficient", self.value_coefficient, above=0.0)
        check_range("value_clip", self.value_clip, above=0.0)
        if self.baseline != "none":
            raise ValueError(f"baseline must be none where a critic is the baseline, not {self.baseline!r}")
        for key in ("rho_bar", "c_bar"):
            if self.estimator != "vtrace" and getattr(self, key) != 1.0:
                raise ValueError(f"{key} is {getattr(self, key)}, but estimator {self.estimator!r} allows only 1.0")

    def needs_critic(self) -> bool:
        """Always."""
        return True

    def value_bound(self) -> float | None:
        """The clip of values."""
        return self.value_clip

    def needs_reference(self) -> bool:
        """Whether there is a KL term: one in the reward is computed from the frozen reference at each draw as well."""
        return self.kl_coefficient > 0

    def needs_reference_at_collection(self) -> bool:
        """Never: nothing but rewards is stored."""
        return False

    def advantages(
        self, trajectories: Sequence[Trajectory], reduce: Reduce, reference: Scorer | None = None
    ) -> list[Trajectory]:
        """The trajectories that the group filter keeps, with the statistics of their groups and without advantages."""
        check_groups(trajectories, self.baseline, reduce)
        if self.group_filter is not None:
            trajectories = informative(trajectories, self.group_filter)
        statistics = zip(trajectories, *group_statistics(*outcomes(trajectories)), strict=True)
        return [replace(item, group_mean=float(mean), group_std=float(std)) for item, mean, std in statistics]

    def estimates(self, inputs: ValueInputs) -> Estimates:
        """Advantages, neither whitened nor clipped, returns and TD errors, float32 [S] each.

        A KL term in the reward takes kl_coefficient x log(behavior / reference) (k1) off the reward of each token.

        Raises:
            ValueError: A tensor that the settings ask for is missing.
        """
        rewards, values = inputs.rewards.double(), inputs.values.detach().double()
        if self.kl_coefficient > 0 and self.kl_in == "reward":
            rewards = rewards - self.kl_coefficient * (
                inputs.behavior_log_probs - _given(inputs, "reference_log_probs")
            )
        if self.estimator == "gae":
            found = gae(rewards, values, inputs.segments, self.gamma, self.gae_lambda)
        else:
            log_ratio = _given(inputs, "log_probs").double() - inputs.behavior_log_probs
            bounds = (self.gae_lambda, self.rho_bar, self.c_bar)
            found = vtrace(rewards, values, inputs.segments, log_ratio, self.gamma, *bounds)
        return Estimates(found.advantages.float(), found.returns.float(), found.td_errors.float())

    def normalized(self, advantages: Tensor, reduce: Reduce) -> Tensor:
        """Advantages [S] of this rank's part of an optimizer batch, whitened over all ranks and clipped as set.

        Each sampled token weighs the same. Calls ``reduce`` twice where ``whiten`` is set, also without tokens.
        """
        values = advantages.double()
        if self.whiten:
            values = whitened(values, values.new_ones(len(values)), reduce)
        if self.advantage_clip is not None:
            values = values.clamp(-self.advantage_clip, self.advantage_clip)
        return values.float()

    def _token_loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """As :meth:`Reinforce.loss` says, plus value_coefficient x the value loss.

        Further metrics: ``value_loss``, ``value_clipped``, ``value``, ``return``, ``td_error`` (its magnitude), and
        ``kl_reward`` (k1 of the behavior policy) where it is in the reward.
        """
        token_loss, metrics = super()._token_loss(inputs)
        values, returns = _given(inputs, "values"), _given(inputs, "returns")
        squares, clipped = value_loss(values, _given(inputs, "old_values"), returns, self.value_clip)
        metrics |= {"value_loss": squares, "value_clipped": clipped}
        metrics |= {"value": values, "return": returns, "td_error": _given(inputs, "td_errors").abs()}
        if self.kl_in == "reward" and self.needs_reference():
            metrics["kl_reward"] = inputs.behavior_log_probs - _given(inputs, "reference_log_probs")
        return token_loss + self.value_coefficient * squares, metrics


def _given(inputs: LossInputs | ValueInputs, name: str) -> Tensor:
    found: Tensor | None = getattr(inputs, name)
    if found is None:
        raise ValueError(f"PPO needs {name} under its settings, but the inputs have no {name}")
    return found
