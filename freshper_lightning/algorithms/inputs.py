"""What a loss function receives and what it returns."""

from dataclasses import dataclass, field, fields, replace

from torch import Tensor

TRAINED = ("log_probs", "entropy", "values")
"""Inputs of a loss that may have a gradient."""


@dataclass(slots=True)
class LossInputs:
    """Everything that a loss may look at, flat over the ``S`` sampled tokens of a micro-batch's ``B`` conversations.

    A conversation is never split over micro-batches, so that what a loss computes per conversation does not depend on
    how an optimizer batch is split. Three policies have three names: *behavior* sampled the tokens, *proximal* is the
    trainer's at the start of a replay epoch, and the current one has the gradient.

    The weight of the draw and the correction of the behavior policy are two things: ``importance_weights`` says how a
    trajectory was drawn, the ratio of ``log_probs`` to ``behavior_log_probs`` says who acted. They are multiplied at
    the end and logged apart.
    """

    log_probs: Tensor
    """float32 [S], with gradient: the current policy, at the sampling temperature."""
    behavior_log_probs: Tensor
    """float32 [S]: the engine, when the token was sampled."""
    advantages: Tensor
    """float32 [S]."""
    coefficients: Tensor
    """float32 [S]: the aggregation, see :func:`freshper_lightning.algorithms.losses.aggregation_coefficients`."""
    importance_weights: Tensor
    """float32 [S]: prioritized-replay weight of the token's trajectory; 1 for fresh data."""
    segments: Tensor
    """int64 [S]: which of the B conversations the token belongs to."""
    lengths: Tensor
    """int64 [B]: sampled tokens of each conversation."""
    proximal_log_probs: Tensor | None = None
    """float32 [S]: the trainer before the first update of the replay epoch, where a loss asks for it."""
    entropy: Tensor | None = None
    """float32 [S], with gradient where an entropy bonus is asked for: entropy of the full distribution, in nats."""
    reference_log_probs: Tensor | None = None
    """float32 [S]: the frozen reference policy, where a KL term is asked for."""
    values: Tensor | None = None
    """float32 [S], with gradient: the critic's value of the state that each token was sampled in."""
    old_values: Tensor | None = None
    """float32 [S]: the same by the critic that ``advantages`` and ``returns`` were computed with."""
    returns: Tensor | None = None
    """float32 [S]: what the values should be."""
    td_errors: Tensor | None = None
    """float32 [S]: of ``old_values``; for the metrics."""

    def with_constants(self) -> "LossInputs":
        """The same, detached from any graph but for what the current policy and its critic say now."""
        stored = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in TRAINED}
        return replace(self, **{name: tensor.detach() for name, tensor in stored.items() if tensor is not None})


@dataclass(slots=True)
class ValueInputs:
    """What advantages and returns are estimated from, flat over the ``S`` sampled tokens of whole conversations."""

    rewards: Tensor
    """float32 [S]: see :meth:`freshper_lightning.trajectory.Trajectory.token_rewards`."""
    values: Tensor
    """float32 [S]."""
    segments: Tensor
    """int64 [S], ascending."""
    behavior_log_probs: Tensor
    """float32 [S]."""
    log_probs: Tensor | None = None
    """float32 [S]: the policy that the estimates are for, where the estimator asks for it."""
    reference_log_probs: Tensor | None = None
    """float32 [S]: the frozen reference policy, where a KL term in the reward is asked for."""


@dataclass(slots=True)
class LossOutput:
    """The micro-batch's share of the loss and what happened at each token."""

    loss: Tensor
    """Scalar with gradient: sum over tokens of coefficient x importance weight x token loss."""
    token_metrics: dict[str, Tensor] = field(default_factory=dict)
    """Detached float32 [S] per name; the caller averages them over tokens, without weights."""
