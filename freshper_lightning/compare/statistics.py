"""Interquartile means over seeds, their bootstrap intervals, and paired differences from a baseline."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 9999
TIE = 1e-6
"""Absolute and relative differences up to it are none: logs have single precision, so that equal means may differ in
their last digits."""
SEED = 0
"""Of the resampling, so that a table always gives the same report."""


@dataclass(frozen=True)
class Estimate:
    """An interquartile mean over seeds with its interval."""

    value: float
    low: float | None
    """None where there is one seed only."""
    high: float | None
    runs: int
    """Seeds that it rests on."""


def ties(one: ArrayLike, other: ArrayLike) -> NDArray[np.bool_]:
    """Where two values are as equal as logs can tell."""
    return np.asarray(np.isclose(one, other, rtol=TIE, atol=TIE))


def interquartile_mean(values: Floats, axis: int = -1) -> Floats:
    """Mean of what is left without the lowest and the highest quarter, rounded down to whole runs.

    Of 5 runs the middle 3, of 4 the middle 2, of 3 and fewer all.
    Source: Agarwal et al. 2021 (2108.13264), section 4.3.
    """
    found: Floats = stats.trim_mean(values, 0.25, axis=axis)
    return found


def estimate(values: Floats) -> Estimate:
    """Of one value per seed, [n].

    The interval is the percentile bootstrap's: seeds are drawn with replacement within the arm, which is the stratum
    (the paper's strata are tasks, of which a comparison has one). It is too narrow for few seeds; docs/results.md says
    by how much.
    Source: Agarwal et al. 2021 (2108.13264), section 4.1; Efron 1979.

    Raises:
        ValueError: There are no values.
    """
    low, high = intervals(values[:, None])
    if len(values) == 1:
        return Estimate(float(values[0]), None, None, 1)
    return Estimate(float(interquartile_mean(values)), float(low[0]), float(high[0]), len(values))


def intervals(values: Floats) -> tuple[Floats, Floats]:
    """Lower and upper ends [m] for [n, m]: n seeds at m places, each place for itself; equal where n is 1.

    Raises:
        ValueError: There are no seeds.
    """
    if not len(values):
        raise ValueError("an interval needs at least one seed")
    if len(values) == 1:
        return values[0], values[0]
    found = stats.bootstrap(
        (values,),
        interquartile_mean,
        axis=0,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        batch=1000,
        rng=np.random.default_rng(SEED),
    )
    return found.confidence_interval.low, found.confidence_interval.high


@dataclass(frozen=True)
class Difference:
    """An arm less the baseline, seed by seed: both start from the seed's one warm start."""

    estimate: Estimate
    above: int
    """Seeds where the arm has the greater value."""
    below: int
    """Seeds where it has the smaller one."""


def paired(arm: Mapping[int, float], baseline: Mapping[int, float], alike: Collection[int] = ()) -> Difference | None:
    """Of values by seed; of the seeds that both have, and None where there is none.

    Seeds in ``alike`` count as ties whatever their values.
    """
    seeds = sorted(arm.keys() & baseline.keys())
    if not seeds:
        return None
    ours, theirs = (np.array([values[seed] for seed in seeds]) for values in (arm, baseline))
    differences = ours - theirs
    signs = np.sign(np.where(ties(ours, theirs) | np.isin(seeds, list(alike)), 0.0, differences))
    return Difference(estimate(differences), int((signs > 0).sum()), int((signs < 0).sum()))


def sign_test(above: int, below: int) -> float:
    """Two-sided p-value of so many signs where either is as likely; ties do not count. 5 of 5 give 0.0625."""
    if above + below == 0:
        return 1.0
    return float(stats.binomtest(above, above + below).pvalue)
