"""What a loss function receives and what it returns."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class LossInputs:
    """Everything that a loss may look at, flat over the ``S`` sampled tokens of one micro-batch.

    The weight of the draw and the correction of the behaviour policy are two things: ``importance_weights`` says how a
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
    entropy: Tensor | None = None
    """float32 [S], with gradient where an entropy bonus is asked for: entropy of the full distribution, in nats."""
    reference_log_probs: Tensor | None = None
    """float32 [S]: the frozen reference policy, where a KL term is asked for."""


@dataclass(slots=True)
class LossOutput:
    """The micro-batch's share of the loss and what happened at each token."""

    loss: Tensor
    """Scalar with gradient: sum over tokens of coefficient x importance weight x token loss."""
    token_metrics: dict[str, Tensor] = field(default_factory=dict)
    """Detached float32 [S] per name; the caller averages them over tokens, without weights."""
