"""Adaptive tau: how fast stored trajectories lose their worth, from the spread of their log-ratios over age."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike

from freshper_lightning.replay.columns import Floats
from freshper_lightning.replay.requirements import require, require_one_of

Level = Literal["token", "sequence"]
"""What a log-ratio is of: one sampled token, or a whole trajectory (the sum over its tokens)."""

LEVELS: tuple[Level, ...] = get_args(Level)

Growth = Literal["linear", "quadratic"]
"""How the variance of log-ratios is taken to grow with age: as in diffusion, or as in a steady drift."""

POWERS: dict[Growth, int] = {"linear": 1, "quadratic": 2}

BUCKETS = 8
"""Age buckets between the youngest and the oldest age above 0, of equal ratio."""
LEAST_IN_BUCKET = 3.0
LEAST_TO_FIT = 8.0
"""Effective numbers of trajectories below which a bucket, or all of them, says nothing."""
LARGEST_STEP = 2.0
"""Greatest factor by which tau moves at a time."""
_REWEIGHTINGS = 20


@dataclass(frozen=True, eq=False)
class LogRatios:
    """Log-ratios of current to behavior policy, unclipped, in trajectories that no update has been trained on.

    One row per trajectory. Count, sum and sum of squares over its tokens suffice for a variance at either level.
    """

    rows: Floats
    """float64 [n, 5]: age, weight, sampled tokens, sum of their log-ratios, sum of squared log-ratios."""

    @classmethod
    def of_tokens(
        cls, log_ratios: ArrayLike, segments: ArrayLike, ages: ArrayLike, weights: ArrayLike | None = None
    ) -> Self:
        """From the log-ratio of each token [S] and the trajectory [S] that it belongs to.

        Args:
            log_ratios: float64 [S], in nats.
            segments: int64 [S]: index into ``ages``.
            ages: float64 [n], at least 0, in units of the clock.
            weights: float64 [n], above 0: one over how likely each trajectory was to be looked at, up to a factor;
                ``base**-alpha`` for what was drawn by priority. Equal by default.

        Raises:
            ValueError: A log-ratio is not finite (a token has lost its probability), or an age or a weight is out of
                range.
        """
        values, which, age = np.asarray(log_ratios, np.float64), np.asarray(segments), np.asarray(ages, np.float64)
        weight = np.ones(len(age)) if weights is None else np.asarray(weights, np.float64)
        for name, given, holds, allowed in (
            ("log_ratios", values, np.isfinite(values), "finite: a token has lost its probability"),
            ("ages", age, np.isfinite(age) & (age >= 0), "finite and at least 0"),
            ("weights", weight, np.isfinite(weight) & (weight > 0), "finite and above 0"),
        ):
            require(bool(holds.all()), name, given[~holds][:1].tolist(), allowed)
        sums = [np.bincount(which, part, minlength=len(age)) for part in (np.ones(len(values)), values, values**2)]
        return cls(np.stack([age, weight, *sums], axis=1))

    @classmethod
    def joined(cls, parts: Sequence["LogRatios"]) -> Self:
        """All rows of all parts, in order."""
        return cls(np.concatenate([np.empty((0, 5)), *(part.rows for part in parts)]))

    def __len__(self) -> int:
        return len(self.rows)

    def chosen(self, which: slice | np.ndarray[Any, Any]) -> "LogRatios":
        """The rows that an index, a slice or a mask [n] chooses."""
        return LogRatios(self.rows[which])

    def at_level(self, level: Level) -> "LogRatios":
        """With the unit of ``level`` in the place of tokens."""
        if level == "token":
            return self
        age, weight, _, total, _ = self.rows.T
        return LogRatios(np.stack([age, weight, np.ones(len(self)), total, total**2], axis=1))

    def normalized(self) -> "LogRatios":
        """With weights that sum to the effective number, ``(sum w)**2 / sum w**2``, so that origins can be joined."""
        rows = self.rows.copy()
        if len(rows):
            rows[:, 1] /= rows[:, 1].max()  # squares of the weights must not overflow
            rows[:, 1] *= rows[:, 1].sum() / np.square(rows[:, 1]).sum()
        return LogRatios(rows)


@dataclass(frozen=True, eq=False)
class AgeBuckets:
    """Variance of log-ratios by age; a bucket with too few trajectories is not there."""

    variances: Floats
    """float64 [b]: unbiased within a bucket, whose trend of the mean over age is taken out."""
    sizes: Floats
    """float64 [b]: effective number of trajectories; tokens of one trajectory are no independent witnesses."""
    powers: Floats
    """float64 [2, b]: mean age and mean squared age."""
    at_birth: float
    """Variance at age 0, which engine and trainer that round differently have; 0 where nothing was seen at age 0."""


@dataclass(frozen=True)
class DriftFit:
    """``s2(age) = at_birth + rate x age**power``."""

    rate: float
    """At least 0; units of the clock to minus ``power``."""
    power: int
    log_likelihood: float
    """Of the variances of the buckets, up to what does not depend on the fit."""

    def tau_hat(self) -> float:
        """Age at which drift has brought s2 to 1 and ESS/n to 1/e: ``rate**(-1/power)``; infinite without drift."""
        return math.inf if self.rate == 0 else self.rate ** (-1 / self.power)


@dataclass(frozen=True)
class Fits:
    """Both hypotheses about one set of buckets."""

    linear: DriftFit
    quadratic: DriftFit
    at_birth: float

    def of(self, growth: Growth) -> DriftFit:
        """The fit of that name."""
        return self.linear if growth == "linear" else self.quadratic

    def quadratic_gain(self) -> float:
        """AIC of the linear fit minus that of the quadratic one: above 0 where the quadratic one fits better."""
        return 2 * (self.quadratic.log_likelihood - self.linear.log_likelihood)


def variance_by_age(sources: Sequence[LogRatios], level: Level) -> AgeBuckets:
    """Variance of log-ratios at ``level`` in each age bucket.

    Args:
        sources: Rows by origin. Weights mean something within an origin only, and are normalized in each bucket.
        level: Of tokens or of whole trajectories.
    """
    at_level = [source.at_level(level) for source in sources]
    ages = np.concatenate([source.rows[:, 0] for source in at_level])
    borders = _borders(ages[ages > 0])
    members = [
        [source.chosen(np.digitize(source.rows[:, 0], borders) == b) for source in at_level] for b in range(BUCKETS + 1)
    ]
    young, *older = [LogRatios.joined([part.normalized() for part in parts]) for parts in members]
    kept = [bucket for bucket in older if bucket.rows[:, 1].sum() >= LEAST_IN_BUCKET]
    return AgeBuckets(
        variances=np.array([_variance(bucket) for bucket in kept]),
        sizes=np.array([bucket.rows[:, 1].sum() for bucket in kept]),
        powers=np.array([_mean_powers(bucket) for bucket in kept]).reshape(len(kept), 2).T,
        at_birth=_variance(young) if young.rows[:, 1].sum() >= LEAST_IN_BUCKET else 0.0,
    )


def _borders(ages: Floats) -> Floats:
    """Lower borders [8] of the buckets of ages above 0; what is below the first has age 0."""
    if len(ages) == 0:
        return np.full(BUCKETS, np.inf)
    low, high = float(ages.min()), float(ages.max())
    borders: Floats = np.geomspace(low, high, BUCKETS + 1)[:-1]
    borders[0] = low
    # Each point is off by a rounding error of its own, so that borders of nearly equal ages may run backwards.
    return np.maximum.accumulate(borders)


def _variance(ratios: LogRatios) -> float:
    """Variance over units about a line in age, since the mean of a log-ratio falls as its variance grows.

    Without taking the line out, ages that differ inside a bucket would add the variance of their means.
    """
    age, weight, count, total, square = ratios.rows.T
    mass = weight * count
    mean_age, mean = (mass @ age) / mass.sum(), (weight @ total) / mass.sum()
    spread = float(weight @ (square - 2 * mean * total + count * mean**2))
    of_ages, slope = float(mass @ (age - mean_age) ** 2), float(weight @ ((age - mean_age) * (total - count * mean)))
    trend = bool(of_ages > 1e-12 * mass.sum() * mean_age**2)
    units = float(mass.sum() ** 2 / (weight**2 @ count))
    left = spread - (slope**2 / of_ages if trend else 0.0)
    return max(left, 0.0) / float(mass.sum()) * units / max(units - 1 - trend, 1.0)


def _mean_powers(ratios: LogRatios) -> tuple[float, float]:
    age, weight, count, _, _ = ratios.rows.T
    mass = weight * count / (weight @ count)
    return float(mass @ age), float(mass @ age**2)


def fit_drift(buckets: AgeBuckets, growth: Growth) -> DriftFit:
    """Weighted least squares of the variance above that at birth, through the origin.

    A variance that is estimated from ``n`` Gaussian values has the variance ``2 s2**2 / n``: weights are ``n`` over the
    square of the fitted s2, and are renewed until they agree with it. That is Fisher scoring, so that the result has
    the maximum likelihood, and likelihoods of several fits can be compared.
    """
    power = POWERS[growth]
    x, birth, sizes = buckets.powers[power - 1], buckets.at_birth, buckets.sizes
    weights, rate = sizes / x**2, 0.0
    for _ in range(_REWEIGHTINGS):
        rate = max(float(weights @ (x * (buckets.variances - birth)) / (weights @ x**2)), 0.0)
        if birth + rate == 0:
            return DriftFit(0.0, power, 0.0)
        weights = sizes / (birth + rate * x) ** 2
    expected = birth + rate * x
    return DriftFit(rate, power, float(-0.5 * sizes @ (np.log(expected) + buckets.variances / expected)))


class AdaptiveTau:
    """Estimates tau_hat, the age that costs a factor e of effective sample size, and moves tau towards alpha tau_hat.

    For Gaussian log-ratios of variance s2 that average to a density ratio, ``log(ESS/n) = -s2`` exactly. The variance
    is used rather than the plug-in ESS, which cannot fall below 1/n and so calls drift slow where it is fast. Draws
    fall with age as ``exp(-alpha age / tau)``, and ESS/n falls as ``exp(-age / tau_hat)``: ``tau = alpha tau_hat``
    makes them fall alike. Estimates use the last ``window`` observations of each origin.

    Args:
        level: The level that the loss takes ratios at.
        growth: The fit that tau follows.
        bounds: Least and greatest tau, in units of the clock.
        window: Trajectories that are remembered, of held-out and of drawn ones each.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        level: Level = "token",
        growth: Growth = "linear",
        bounds: tuple[float, float] = (1.0, 1000.0),
        window: int = 512,
    ) -> None:
        require_one_of("level", level, LEVELS)
        require_one_of("growth", growth, tuple(POWERS))
        in_order = len(bounds) == 2 and 0 < bounds[0] <= bounds[1] < math.inf
        require(in_order, "bounds", tuple(bounds), "two numbers, finite, above 0 and in order")
        require(window >= 1, "window", window, "at least 1")
        self.level, self.growth, self.bounds, self.window = level, growth, bounds, window
        self._held_out = LogRatios.joined([])
        self._drawn = LogRatios.joined([])

    def observe(self, ratios: LogRatios) -> None:
        """Counts held-out trajectories that were looked at whatever their priority."""
        self._held_out = LogRatios.joined([self._held_out, ratios]).chosen(slice(-self.window, None))

    def observe_drawn(self, ratios: LogRatios) -> None:
        """Counts trajectories at their first visit by a draw, whose weights are ``base**-alpha``."""
        self._drawn = LogRatios.joined([self._drawn, ratios]).chosen(slice(-self.window, None))

    def fits(self, level: Level) -> Fits | None:
        """Both fits at a level, or nothing while too few trajectories were seen at ages above 0."""
        buckets = variance_by_age([self._held_out, self._drawn], level)
        if buckets.sizes.sum() < LEAST_TO_FIT:
            return None
        return Fits(fit_drift(buckets, "linear"), fit_drift(buckets, "quadratic"), buckets.at_birth)

    def next_tau(self, tau: float, alpha: float) -> float:
        """A step from ``tau`` towards ``alpha x tau_hat``: by a factor of at most 2, and into the bounds.

        Raises:
            ValueError: ``tau`` or ``alpha`` is out of range; without alpha, draws do not depend on tau.
        """
        require(0 < tau < math.inf, "tau", tau, "finite and above 0")
        require(0 < alpha <= 1, "alpha", alpha, "above 0 and at most 1")
        fits, (low, high) = self.fits(self.level), self.bounds
        if fits is None:
            return tau
        target = alpha * fits.of(self.growth).tau_hat()
        return min(max(min(max(target, tau / LARGEST_STEP), tau * LARGEST_STEP), low), high)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The observations that are remembered, float64 [n, 5] of each origin."""
        return {name: torch.from_numpy(part.rows.copy()) for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what :meth:`state_dict` returned."""
        held_out, drawn = (LogRatios(state[name].numpy().copy()) for name in self._parts())
        self._held_out, self._drawn = held_out, drawn

    def _parts(self) -> dict[str, LogRatios]:
        return {"held_out": self._held_out, "drawn": self._drawn}
