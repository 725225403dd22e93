"""Value targets, advantages and the value loss of a critic. Pure functions of flat tensors over sampled tokens.

An episode is the sequence of its ``S`` sampled tokens: what the environment says between two turns is part of the next
token's state and no step of its own. ``segments`` (int64 [S], ascending) names the conversation of each token. The
value after the last token is 0, also where an episode was truncated: the limits of turns and of room belong to the
task, and running into them is an outcome like any other.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from freshper_lightning.algorithms.ratios import importance_ratio

Estimator = Literal["gae", "vtrace"]
"""Generalized advantage estimation, or V-trace, which weighs errors by how likely their tokens still are."""

ESTIMATORS: tuple[str, ...] = get_args(Estimator)


@dataclass(frozen=True, slots=True)
class Estimates:
    """What values and rewards say about each of ``S`` tokens."""

    advantages: Tensor
    """[S]."""
    returns: Tensor
    """[S]: what the value of a token's state should have been."""
    td_errors: Tensor
    """[S]: reward plus discounted value of the next state, minus the value, whatever the estimator."""


def td_errors(rewards: Tensor, values: Tensor, segments: Tensor, gamma: float) -> Tensor:
    """``r_t + gamma V_{t+1} - V_t`` [S] for rewards and values [S]."""
    return rewards + gamma * following(values, segments) - values


def gae(rewards: Tensor, values: Tensor, segments: Tensor, gamma: float, lam: float) -> Estimates:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), truncated at the end of each conversation.

    The return is the advantage plus the value. With ``lam`` = 1 it is the discounted sum of the rewards to come, with 0
    the advantage is the TD error.
    """
    errors = td_errors(rewards, values, segments, gamma)
    advantages = recurrence(errors, gamma * lam * continues(segments).to(errors.dtype))
    return Estimates(advantages, advantages + values, errors)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    segments: Tensor,
    log_ratio: Tensor,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> Estimates:
    """V-trace targets of the current policy out of a behavior policy's tokens (arXiv:1802.01561, eq. 1 and remark 1).

    With rho_t = min(rho_bar, ratio_t) and c_t = lam min(c_bar, ratio_t), the return is
    v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1}), and the advantage r_t + gamma v_{t+1} - V_t, as in the
    paper's policy gradient (section 4.2) but for the factor rho_t, which the correction of the loss brings.

    Args:
        rewards: [S].
        values: [S].
        segments: int64 [S].
        log_ratio: [S]: logarithm of current over behavior probability of each token.
        gamma: Discount from one sampled token to the next.
        lam: Weight of later errors.
        rho_bar: Bound of the ratio of a token's own error: 1 or less moves the fixed point towards the behavior policy.
        c_bar: Bound of the ratio that passes later errors on.
    """
    ratio = importance_ratio(log_ratio)
    errors = td_errors(rewards, values, segments, gamma)
    decays = gamma * lam * ratio.clamp(max=c_bar) * continues(segments)
    returns = values + recurrence(ratio.clamp(max=rho_bar) * errors, decays)
    return Estimates(rewards + gamma * following(returns, segments) - values, returns, errors)


def continues(segments: Tensor) -> Tensor:
    """bool [S]: whether another sampled token of the same conversation comes after."""
    return torch.cat([segments[1:] == segments[:-1], segments.new_zeros(min(len(segments), 1), dtype=torch.bool)])


def following(values: Tensor, segments: Tensor) -> Tensor:
    """The value [S] of the next sampled token of the same conversation, 0 after the last."""
    return values.roll(-1).masked_fill(~continues(segments), 0.0)


def recurrence(terms: Tensor, decays: Tensor) -> Tensor:
    """``x_t = terms_t + decays_t x_{t+1}`` [S], where ``decays`` is 0 at the end of each conversation.

    Doubles its reach with every step, so that it takes log2(S) of them and as many passes over memory.
    """
    sums, reach = terms, 1
    while reach < len(terms):
        sums = sums + decays * _ahead(sums, reach)
        decays = decays * _ahead(decays, reach)
        reach *= 2
    return sums


def _ahead(values: Tensor, distance: int) -> Tensor:
    return torch.cat([values[distance:], torch.zeros_like(values[:distance])])


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error [S] of values [S], and where the clip has taken its gradient (bool [S]).

    With a clip it is the larger of the error's square and that of the value kept within ``clip`` of ``old_values``
    (the PPO2 implementation of arXiv:1707.06347): a value that has come closer to its return than that has no gradient.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, torch.zeros_like(values, dtype=torch.bool)
    change = (values - old_values).detach()
    outside = change.abs() > clip
    bounded = (torch.where(outside, old_values + change.clamp(-clip, clip), values) - returns).square()
    return torch.maximum(errors, bounded) / 2, outside & (bounded > errors)


def value_moments(values: Tensor, returns: Tensor) -> Tensor:
    """float64 [5]: number of tokens, and sums of return, its square, error and its square, for values, returns [S].

    The moments of disjoint sets add up.
    """
    returns = returns.double()
    errors = returns - values.double()
    count = torch.tensor(float(len(returns)), dtype=torch.float64, device=returns.device)
    return torch.stack([count, returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()])


def explained_variance(moments: Tensor) -> float:
    """``1 - Var(return - value) / Var(return)`` of :func:`value_moments`: 1 is perfect, 0 no better than a constant.

    NaN where all returns are equal, or where there are none.
    """
    count, total, squares, error, error_squares = map(float, moments)
    if count == 0:
        return math.nan
    variance, left = squares / count - (total / count) ** 2, error_squares / count - (error / count) ** 2
    return 1.0 - left / variance if variance > 1e-12 * max(1.0, squares / count) else math.nan
