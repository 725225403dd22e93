"""How the spread of log-ratios grows with age: in proportion, as a diffusion does, or with the square of it."""

import math
from collections.abc import Mapping

import numpy as np

from freshper_lightning.replay.adaptive import POWERS, AgeBuckets, DriftFit, Growth, fit_drift
from freshper_lightning.study.bootstrap import Floats


def fit_growth(variances: Mapping[int, float], growth: Growth) -> tuple[DriftFit, float]:
    """The fit that adaptive tau makes, to variances by age, and its R2.

    Every age has as many trajectories, the same ones; that at age 0 is what engine and trainer disagree by, and is
    taken off. R2 is one minus squared residuals over squared deviations from the mean, over ages above 0, with the
    fit's own weights, one over the square of the fitted variance: relative errors count. It is negative where a
    constant would fit better, and NaN where nothing grows.
    """
    ages, values = _above_zero(variances)
    birth = variances.get(0, 0.0)
    fit = fit_drift(AgeBuckets(values, np.ones(len(ages)), np.stack([ages, ages**2]), birth), growth)
    expected = birth + fit.rate * ages ** POWERS[growth]
    if fit.rate == 0:
        return fit, math.nan
    weights = expected**-2
    mean = weights @ values / weights.sum()
    return fit, 1 - float(weights @ np.square(values - expected) / (weights @ np.square(values - mean)))


def local_exponents(variances: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """Slope of log variance over log age between neighbouring ages above 0: 1 is diffusion, 2 a steady drift."""
    ages, values = _above_zero(variances)
    slopes = np.diff(np.log(values - variances.get(0, 0.0))) / np.diff(np.log(ages))
    return {(int(a), int(b)): float(s) for a, b, s in zip(ages[:-1], ages[1:], slopes, strict=True)}


def _above_zero(variances: Mapping[int, float]) -> tuple[Floats, Floats]:
    ages = sorted(age for age in variances if age > 0)
    return np.array(ages, np.float64), np.array([variances[age] for age in ages])
