"""Per-token terms of the policy loss and how they are summed. Pure functions of flat tensors over sampled tokens."""

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""Mean over tokens; mean over sequences of the mean over tokens; mean over sequences of the sum over tokens."""

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

LOG_RATIO_BOUND = 20.0
"""Largest absolute log-ratio, in nats, that is exponentiated; beyond it the ratio is constant."""


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Ratio of current to behavior probability [S], in [e**-20, e**20]; without gradient beyond these bounds."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate [S] (arXiv:1707.06347, eq. 7) and where it has lost its gradient (bool [S]).

    The minimum of rho A and clip(rho, 1 - low, 1 + high) A is A times rho clamped from above for A > 0 and from
    below for A < 0. The dual clip (arXiv:1912.09729, eq. 5) also bounds rho by ``dual`` > 1, only where A < 0.
    """
    negative = advantages < 0
    floor = torch.where(negative, ratio.new_full((), 1.0 - low), 0.0)
    ceiling = torch.where(negative, ratio.new_full((), torch.inf if dual is None else dual), 1.0 + high)
    clipped = ((ratio < floor) | (ratio > ceiling)) & (advantages != 0)
    return ratio.clamp(floor, ceiling) * advantages, clipped


def truncated_surrogate(log_probs: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Policy-gradient surrogate [S] under the weight min(rho, cap), and where the cap holds (bool [S]).

    The weight is a constant: the gradient is min(rho, cap) A grad log pi for every token, and none is dropped
    (truncated importance sampling, Ionides 2008, per token).
    """
    weights = ratio.detach().clamp(max=cap)
    return weights * advantages * log_probs, ratio > cap


def k3(log_ratio: Tensor) -> Tensor:
    """Non-negative estimate r - 1 - log r of a KL divergence in nats, per token [S], for log r [S].

    For samples of p and r = q/p its mean is KL(p || q) (Schulman 2020, estimator k3). Written with ``expm1``, since
    r - 1 cancels near 1; only large r is bounded, because -log r alone cannot overflow.
    """
    bounded = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return bounded.expm1() - bounded


def aggregation_coefficients(
    kind: Aggregation, segments: Tensor, lengths: Tensor, total_tokens: float, total_sequences: float
) -> Tensor:
    """Coefficient of each token's loss (float32 [S]), independent of how the optimizer batch is split and packed.

    ``token_mean`` is 1 / total_tokens, ``sequence_mean`` is 1 / (length x total_sequences), ``sequence_sum`` is
    1 / total_sequences. The caller multiplies by the number of micro-batches and of ranks, over which gradients are
    averaged. Totals of zero, as in a skipped update, give coefficients of zero.

    Args:
        kind: The aggregation.
        segments: int64 [S]: the trajectory of each token, an index into ``lengths``.
        lengths: [B]: sampled tokens of each trajectory of the micro-batch.
        total_tokens: Sampled tokens of the whole optimizer batch, over all ranks and micro-batches.
        total_sequences: Trajectories of the whole optimizer batch, over all ranks and micro-batches.

    Raises:
        ValueError: ``kind`` is not one of the known aggregations.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {kind!r}")
    total = total_tokens if kind == "token_mean" else total_sequences
    if total == 0:
        return torch.zeros(segments.shape, device=segments.device)
    if kind == "sequence_mean":
        return (1.0 / (lengths.double() * total))[segments].float()
    return torch.full(segments.shape, 1.0 / total, device=segments.device)


def weighted_loss(token_loss: Tensor, coefficients: Tensor, importance_weights: Tensor) -> Tensor:
    """Sum of coefficient x importance weight x token loss, where only the token loss [S] has a gradient."""
    return (coefficients.detach() * importance_weights.detach() * token_loss).sum()
