"""How far the policy is from the one that sampled: divergences, effective sample sizes, tokens beyond the clip."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freshper_lightning.algorithms.ess import ess_of_moments, pooled_moments, weight_moments
from freshper_lightning.algorithms.losses import k3
from freshper_lightning.algorithms.ratios import LEVELS, importance_ratio
from freshper_lightning.study.bootstrap import Estimate, Indices, estimate

CLIP = 0.2
"""PPO's."""

Groups = Sequence[Sequence[Tensor]]
"""Log-ratios [S] of the sampled tokens of each trajectory, by group."""


def staleness(log_ratios: Groups, samples: Indices) -> dict[str, Estimate]:
    """Measures of log(current / behavior) on trajectories of the behavior policy.

    For each level (``token``, ``geometric`` mean over a trajectory, ``sequence``): ``variance_*`` of the log-ratio,
    ``ess_*``, the plug-in (sum w)**2 / (n sum w**2), and ``gaussian_ess_*``, exp(-variance), which it would be for
    Gaussian log-ratios. ``clip_share`` counts tokens whose ratio is outside of 1 - 0.2 and 1 + 0.2.
    :func:`divergence` gives ``kl_behavior_current*``.

    Args:
        log_ratios: By group and trajectory.
        samples: int64 [draws, groups]: bootstrap samples.
    """
    found = divergence("kl_behavior_current", log_ratios, samples)
    for level in LEVELS:
        values = [_at_level(group, level) for group in log_ratios]
        found |= _effective_sizes(level, values, samples)
    tokens = [torch.cat(list(group)) for group in log_ratios]
    outside = [(importance_ratio(group) - 1).abs() > CLIP for group in tokens]
    sums = np.array([[float(group.sum()), len(group)] for group in outside])
    return found | {"clip_share": _ratio(sums, samples)}


def divergence(name: str, log_ratios: Groups, samples: Indices) -> dict[str, Estimate]:
    """KL divergence of the sampling policy to the other, in nats: ``name`` per token, ``name_sequence`` per episode.

    Both are means of r - 1 - log r (estimator k3 of Schulman 2020) for log-ratios log r of other to sampling policy; a
    trajectory's divergence is the expected sum of those of its tokens.
    """
    terms = [[k3(item) for item in group] for group in log_ratios]
    sums = np.array([[float(torch.cat(g).sum()), sum(map(len, g)), len(g)] for g in terms])
    return {name: _ratio(sums[:, :2], samples), f"{name}_sequence": _ratio(sums[:, ::2], samples)}


def ess_bound(kl: Estimate) -> Estimate:
    """What the effective sample size over n cannot exceed, exp(-KL(current || behavior)), of the divergence in nats.

    That share is 1 / E[r**2] with r = current / behavior under the behavior policy, exp(-D2) for the Renyi divergence
    of order 2, which is at least the Kullback-Leibler one (van Erven and Harremoes 2014, theorem 3). The plug-in is
    biased upwards and at least 1/n, so that it may lie above.
    """
    return Estimate(math.exp(-kl.value), math.exp(-kl.high), math.exp(-kl.low))


def _at_level(group: Sequence[Tensor], level: str) -> Tensor:
    """float64: one log-ratio per token, or one per trajectory."""
    if level == "token":
        return torch.cat(list(group)).double()
    sums = torch.stack([item.double().sum() for item in group])
    return sums if level == "sequence" else sums / torch.tensor([len(item) for item in group])


def _effective_sizes(level: str, values: Sequence[Tensor], samples: Indices) -> dict[str, Estimate]:
    moments = torch.stack([weight_moments(group) for group in values])
    sums = np.array([[len(g), float(g.sum()), float(g.square().sum())] for g in values])
    share, variance = _ess_share(moments), _variance(sums)
    shares = np.array([_ess_share(moments[torch.from_numpy(row)]) for row in samples])
    variances = np.array([_variance(sums[row]) for row in samples])
    return {
        f"ess_{level}": estimate(share, shares),
        f"variance_{level}": estimate(variance, variances),
        f"gaussian_ess_{level}": estimate(math.exp(-variance), np.exp(-variances)),
    }


def _ess_share(moments: Tensor) -> float:
    pooled = pooled_moments(moments)
    return ess_of_moments(pooled) / float(pooled[2])


def _variance(sums: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> float:
    count, total, squares = sums.sum(0)
    return max(float(squares / count - (total / count) ** 2), 0.0)


def _ratio(sums: np.ndarray[tuple[int, int], np.dtype[np.float64]], samples: Indices) -> Estimate:
    """Of the sums of two columns."""
    replicates = sums[samples].sum(1)
    return estimate(float(sums[:, 0].sum() / sums[:, 1].sum()), replicates[:, 0] / replicates[:, 1])
