"""Per-token terms of the policy loss and how they are summed. Pure functions of flat tensors over sampled tokens."""

from typing import Literal, get_args

import torch
from torch import Tensor

from freshper_lightning.algorithms.ratios import LOG_RATIO_BOUND

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
"""Mean over tokens; or mean over sequences of the mean over tokens, of their sum, of their sum over a constant."""

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of KL(current || reference) per token (Schulman 2020)."""

KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate [S] (arXiv:1707.06347, eq. 7) and where it has lost its gradient (bool [S]).

    The minimum of rho A and clip(rho, 1 - low, 1 + high) A is A times rho clamped from above for A > 0 and from
    below for A < 0. ``high`` apart from ``low`` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). The dual clip
    (arXiv:1912.09729, eq. 5) also bounds rho by ``dual`` > 1, only where A < 0.
    """
    negative = advantages < 0
    floor = torch.where(negative, ratio.new_full((), 1.0 - low), 0.0)
    ceiling = torch.where(negative, ratio.new_full((), torch.inf if dual is None else dual), 1.0 + high)
    clipped = ((ratio < floor) | (ratio > ceiling)) & (advantages != 0)
    return ratio.clamp(floor, ceiling) * advantages, clipped


def clipped_weight_surrogate(
    log_probs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """CISPO's surrogate [S] (MiniMax-M1, arXiv:2506.13585, eq. 4-5) and where the weight is clipped (bool [S]).

    The weight clip(rho, 1 - low, 1 + high) is a constant, so that no token loses its gradient; ``low`` = 1 bounds
    it from above only.
    """
    constant = ratio.detach()
    clipped = (constant < 1.0 - low) | (constant > 1.0 + high)
    return weighted_surrogate(log_probs, constant.clamp(1.0 - low, 1.0 + high), advantages), clipped


def weighted_surrogate(log_probs: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """Policy-gradient surrogate [S]: the gradient is weight x A x grad log pi, where the weight is a constant."""
    return weights.detach() * advantages * log_probs


def k3(log_ratio: Tensor) -> Tensor:
    """Non-negative estimate r - 1 - log r of a KL divergence in nats, per token [S], for log r [S].

    For samples of p and r = q/p its mean is KL(p || q) (Schulman 2020, estimator k3). Written with ``expm1``, since
    r - 1 cancels near 1; only large r is bounded, because -log r alone cannot overflow.
    """
    bounded = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return bounded.expm1() - bounded


def kl_loss(log_probs: Tensor, reference: Tensor, estimator: KLEstimator, ratio: Tensor | None) -> Tensor:
    """KL(current || reference) per token [S], as a term of the loss.

    k2 is (log pi - log pi_ref)**2 / 2, whose expected gradient is that of the divergence on samples of the current
    policy (arXiv:2510.01555, arXiv:2512.21852); k3 has its value, and alone the expected gradient of KL(reference ||
    current). On samples of another policy ``ratio`` [S], current to behavior, reweighs: k3 is multiplied by it,
    gradient included, whose expectation is the divergence itself (DeepSeek-V3.2, technical report, section 3.1); k2 by
    its value, since only k2's gradient is to be reweighed.

    Raises:
        ValueError: The estimator is k1, whose gradient is 0 on average and pulls nowhere.
    """
    if estimator == "k1":
        raise ValueError("kl_estimator 'k1' has no expected gradient as a loss; allowed are k2, k3")
    if estimator == "k2":
        estimate = (log_probs - reference).square() / 2
        return estimate if ratio is None else ratio.detach() * estimate
    estimate = k3(reference - log_probs)
    if ratio is None:
        return estimate
    # Beyond the bound k3 has no slope, and the ratio's alone would push away from the reference.
    bounded = reference - log_probs > LOG_RATIO_BOUND
    return torch.where(bounded, ratio.detach(), ratio) * estimate


def aggregation_coefficients(
    kind: Aggregation,
    segments: Tensor,
    lengths: Tensor,
    total_tokens: float,
    total_sequences: float,
    constant: float | None = None,
) -> Tensor:
    """Coefficient of each token's loss (float32 [S]), independent of how the optimizer batch is split and packed.

    ``token_mean`` is 1 / total_tokens (DAPO, arXiv:2503.14476), ``sequence_mean`` is 1 / (length x total_sequences)
    (GRPO, arXiv:2402.03300), ``sequence_sum`` is 1 / total_sequences, and ``constant`` is
    1 / (constant x total_sequences) (Dr. GRPO, arXiv:2503.20783). Every token that was sampled counts, also one that a
    mask takes the gradient from. The caller multiplies by the number of micro-batches and of ranks, over which
    gradients are averaged. Totals of zero, as in a skipped update, give coefficients of zero.

    Args:
        kind: The aggregation.
        segments: int64 [S]: the trajectory of each token, an index into ``lengths``.
        lengths: [B]: sampled tokens of each trajectory of the micro-batch.
        total_tokens: Sampled tokens of the whole optimizer batch, over all ranks and micro-batches.
        total_sequences: Trajectories of the whole optimizer batch, over all ranks and micro-batches.
        constant: Divisor of ``constant``, in tokens; for the other aggregations ``None``.

    Raises:
        ValueError: ``kind`` is not one of the known aggregations, or ``constant`` does not go with it.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {kind!r}")
    if (constant is None) == (kind == "constant"):
        raise ValueError(f"the divisor of aggregation {kind!r} cannot be {constant}")
    total = total_tokens if kind == "token_mean" else total_sequences
    if total == 0:
        return torch.zeros(segments.shape, device=segments.device)
    if kind == "sequence_mean":
        return (1.0 / (lengths.double() * total))[segments].float()
    return torch.full(segments.shape, 1.0 / (total * (constant or 1.0)), device=segments.device)


def weighted_loss(token_loss: Tensor, coefficients: Tensor, importance_weights: Tensor) -> Tensor:
    """Sum of coefficient x importance weight x token loss, where only the token loss [S] has a gradient."""
    return (coefficients.detach() * importance_weights.detach() * token_loss).sum()
