"""Effective sample size: how many equally weighted samples a weighted set is worth.

Weights come as logarithms in any common unit, so that nothing overflows. Results are Python floats for logging.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def weight_moments(log_weights: Tensor) -> Tensor:
    """What is to be known of log w [N] for its effective sample size: float64 [3], log sum w, log sum w**2 and N.

    A log-weight of -inf is a sample of no weight; an empty set has the moments -inf, -inf and 0.

    Raises:
        ValueError: A log-weight is NaN or +inf.
    """
    log_weights = log_weights.detach().double().flatten()
    if bool((log_weights.isnan() | log_weights.isposinf()).any()):
        raise ValueError("log_weights must be finite or -inf")
    count = torch.tensor(log_weights.numel(), dtype=torch.float64, device=log_weights.device)
    return torch.stack([log_weights.logsumexp(0), (2 * log_weights).logsumexp(0), count])


def pooled_moments(moments: Tensor) -> Tensor:
    """The moments [3] of the union of K disjoint sets, for the moments [K, 3] of each."""
    return torch.cat([moments[:, :2].logsumexp(0), moments[:, 2:].sum(0)])


def ess_of_moments(moments: Tensor) -> float:
    """Kish's (sum w)**2 / sum w**2, between 1 and N, of moments [3]; NaN where there is no weight at all."""
    log_sum, log_sum_of_squares, count = map(float, moments)
    if log_sum == -math.inf:
        return math.nan
    return min(max(math.exp(2 * log_sum - log_sum_of_squares), 1.0), count)


def effective_sample_size(log_weights: Tensor) -> float:
    """Kish's (sum w)**2 / sum w**2 of log w [N], between 1 and N whatever constant is added to log w.

    A log-weight of -inf is a sample of no weight. NaN where there is no weight at all, as in an empty set.

    Raises:
        ValueError: A log-weight is NaN or +inf.
    """
    return ess_of_moments(weight_moments(log_weights))


def ess_ratio(log_weights: Tensor) -> float:
    """Effective sample size over N, in (0, 1]; NaN where there is no weight at all."""
    return effective_sample_size(log_weights) / max(log_weights.numel(), 1)


def ess_ratio_by_age(log_weights: Tensor, ages: Tensor, edges: Sequence[float]) -> dict[str, float]:
    """Ratio of each age bucket of :func:`bucketed` for log-weights and ages [N]; NaN for an empty bucket."""
    return {name: ess_ratio(log_weights[members]) for name, members in bucketed(ages, edges).items()}


def bucketed(ages: Tensor, edges: Sequence[float]) -> dict[str, Tensor]:
    """Disjoint bool masks [N] that together cover all ages [N] >= 0, by the name of the bucket.

    Edges (1, 10) give the half-open buckets ``0-1``, ``1-10`` and ``10-inf``.

    Raises:
        ValueError: The edges are not positive and increasing.
    """
    borders = [0.0, *edges, float("inf")]
    if any(low >= high for low, high in pairwise(borders)):
        raise ValueError(f"age edges must be positive, finite and increasing, not {list(edges)}")
    bucket = torch.bucketize(ages, torch.tensor(edges, dtype=torch.float64, device=ages.device), right=True)
    names = [f"{low:g}-{high:g}" for low, high in pairwise(borders)]
    return {name: bucket == index for index, name in enumerate(names)}


def sequence_log_weights(log_ratios: Tensor, segments: Tensor, num_sequences: int) -> Tensor:
    """Log importance weight of each trajectory (float64 [B]): the sum of its tokens' log-ratios [S].

    ``segments`` (int64 [S]) names the trajectory of each token.
    """
    sums = torch.zeros(num_sequences, dtype=torch.float64, device=log_ratios.device)
    return sums.index_add_(0, segments, log_ratios.detach().double())
