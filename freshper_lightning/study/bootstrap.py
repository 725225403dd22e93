"""Intervals by resampling whole groups, since members of a group share an instance and a baseline."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

COVERAGE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of its 95 % percentile interval (Efron and Tibshirani 1993, chapter 13)."""

    value: float
    low: float
    high: float


def resamples(groups: int, draws: int, seed: int) -> Indices:
    """int64 [draws, groups]: so many bootstrap samples of groups, with replacement."""
    return np.random.default_rng(seed).integers(groups, size=(draws, groups))


def counts(indices: Indices) -> Floats:
    """float64 [draws, groups]: how often each group is in each sample."""
    groups = indices.shape[1]
    return np.stack([np.bincount(row, minlength=groups) for row in indices]).astype(np.float64)


def estimate(value: float, replicates: Floats) -> Estimate:
    """A value and the interval of its replicates [draws]; those that are no number take no part."""
    finite = replicates[np.isfinite(replicates)]
    if len(finite) == 0:
        return Estimate(value, np.nan, np.nan)
    low, high = np.quantile(finite, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(value, float(low), float(high))
