"""Ratios of two policies at sampled tokens, and the bounds and masks that keep them from ruling an update.

Pure functions of flat tensors over the ``S`` sampled tokens of ``B`` conversations: ``segments`` (int64 [S]) names the
conversation of each token, ``lengths`` (int64 [B]) counts the tokens of each. What is computed over a conversation
needs the whole of it and nothing else.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from freshper_lightning.algorithms.ess import sequence_log_weights

Level = Literal["token", "sequence", "geometric"]
"""The ratio of a token, of its whole conversation (the product), or the geometric mean over its conversation."""

LEVELS: tuple[str, ...] = get_args(Level)

WeightBound = Literal["truncate", "mask"]
"""A weight out of bounds is set to the bound, or to 0."""

WEIGHT_BOUNDS: tuple[str, ...] = get_args(WeightBound)

LOG_RATIO_BOUND = 20.0
"""Largest absolute log-ratio, in nats, that is exponentiated; beyond it the ratio is constant."""


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Ratio of two probabilities [S] in [e**-20, e**20] for its logarithm [S]; without gradient beyond these bounds."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def policy_ratio(log_ratio: Tensor, segments: Tensor, lengths: Tensor, level: Level) -> Tensor:
    """Ratio [S] at the given level, with the gradient ``ratio x grad log pi`` of each token.

    A token's own ratio is that of PPO. The geometric mean is GSPO's (arXiv:2507.18071, eq. 7), the product the plain
    sequence ratio. Both are one value for a conversation, and each token is its own path for the gradient (GSPO-token,
    section 4.3): under one advantage for the whole conversation the sum over its tokens has the gradient of
    length x (geometric mean) x A, or the gradient that the product x A has by itself. Advantages that differ between
    turns reach their own turns only.
    """
    if level == "token":
        return importance_ratio(log_ratio)
    shared = sequence_log_weights(log_ratio, segments, lengths.numel())
    if level == "geometric":
        shared = shared / lengths
    own = log_ratio - log_ratio.detach()
    return importance_ratio(shared.to(log_ratio.dtype)[segments] + own)


def bounded_weights(ratio: Tensor, bound: WeightBound, floor: float, cap: float) -> tuple[Tensor, Tensor]:
    """Importance weight [S] of each token, a constant, and where it is out of bounds (bool [S]).

    ``truncate`` gives min(ratio, cap): truncated importance sampling (Ionides 2008; per token or sequence as the ratio
    is). ``mask`` gives the ratio inside [floor, cap] and 0 outside: masked importance sampling (per token it is IcePop,
    which uses [1/2, 2] or [1/2, 5]). A masked token stays in the denominators of the aggregation.
    """
    ratio = ratio.detach()
    if bound == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio < floor) | (ratio > cap)
    return ratio.masked_fill(outside, 0.0), outside


def negative_drift(
    log_ratio: Tensor, advantages: Tensor, segments: Tensor, lengths: Tensor, threshold: float
) -> Tensor:
    """Tokens (bool [S]) with a negative advantage in conversations that the policy has left behind.

    Such a conversation has a mean of log(behavior / current) above ``threshold``, in nats per token: the off-policy
    sequence mask of DeepSeek-V3.2 (technical report, section 3.1), which leaves positive advantages alone.
    """
    drift = -sequence_log_weights(log_ratio, segments, lengths.numel()) / lengths
    return (advantages < 0) & (drift > threshold)[segments]


def second_moment_outliers(
    log_ratio: Tensor, advantages: Tensor, segments: Tensor, lengths: Tensor, bound: float
) -> Tensor:
    """Tokens (bool [S]) to leave out so that the mean of (log ratio)**2 over the others is at most ``bound``.

    M2PO (arXiv:2510.01161, algorithm 1) looks at tokens whose update would drive the ratio further from 1, that is
    those with log ratio x advantage > 0, and drops the largest first. The paper takes the mean over a batch; here it is
    taken over each conversation, which implies the bound over any batch of them, and does not depend on how a batch is
    split.
    """
    squares = log_ratio.detach().double().square()
    candidates = (log_ratio.detach() * advantages > 0).nonzero()[:, 0]
    ascending = candidates[squares[candidates].argsort(stable=True)]
    ordered = ascending[segments[ascending].argsort(stable=True)]
    owners, values = segments[ordered], squares[ordered]
    counts = torch.bincount(owners, minlength=lengths.numel())
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(ordered), device=ordered.device) - first[owners] + 1
    outliers = torch.zeros_like(segments, dtype=torch.bool)
    outliers[ordered] = _running_sums(values, counts) > bound * rank
    return outliers


def _running_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Sum of each value [K] and those before it of the same owner; owners, in order, have ``counts`` [B] values.

    Each owner has a row of its own, so that what is infinite for one is not subtracted for the next.
    """
    widest = int(counts.max()) if counts.numel() else 0
    held = torch.arange(widest, device=values.device) < counts[:, None]
    rows = values.new_zeros(held.shape).masked_scatter(held, values)
    return rows.cumsum(1)[held]
