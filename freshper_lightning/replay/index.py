"""From priorities to draws: masses, probabilities, stratified sampling and importance weights; pure functions."""

from dataclasses import dataclass

import numpy as np

from freshper_lightning.replay.columns import Columns, Floats, Integers
from freshper_lightning.replay.decay import Decay

SMALLEST_PROBABILITY = 1e-290
"""A probability below this is exactly 0; above it, it has full precision."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotKey:
    """Everything that the masses are a function of."""

    columns: Columns
    now: float
    alpha: float
    decay: Decay

    def matches(self, other: "SnapshotKey") -> bool:
        """Whether both describe the same content, clock value and parameters, so that their masses are bit-equal."""
        same_content = self.columns is other.columns
        return same_content and (self.now, self.alpha, self.decay) == (other.now, other.alpha, other.decay)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The sampling distribution of one moment; depends on its key alone, whoever builds it."""

    key: SnapshotKey
    masses: Floats
    """float64 [N]: ``p**alpha`` up to a common factor; the greatest is 1, unless all are 0."""
    cumulative: Floats
    """float64 [N]: running sum of ``masses``."""
    total: float
    """Sum of ``masses``."""

    @staticmethod
    def build(key: SnapshotKey) -> "Snapshot":
        """Evaluates every entry; O(N)."""
        masses = masses_of(log_priorities(key), key.alpha)
        return Snapshot(key, masses, np.cumsum(masses), float(masses.sum()))

    def probabilities(self) -> Floats:
        """float64 [N]: normalised masses; all 0 where there is no mass."""
        return self.masses / self.total if self.total > 0 else self.masses.copy()

    def probabilities_of(self, rows: Integers) -> Floats:
        """float64 [n]: normalised masses of drawn rows."""
        probabilities: Floats = self.masses[rows] / self.total
        return probabilities

    def draw(self, uniforms: Floats) -> Integers:
        """Rows [n] of a stratified draw, see :func:`stratified`."""
        return stratified(self.cumulative, uniforms)


def log_priorities(key: SnapshotKey) -> tuple[Floats, Floats]:
    """Log priorities up to a common constant, as an unevaluated sum of two float64 [N], high and low part.

    ``log p = log base + log fresh + log decay(age)``. Ages of a decay that factorises count from the youngest entry
    that can be drawn: the subtraction is exact on integers, so an age of 1e9 common to all entries costs nothing. The
    low part holds the rounding errors of the additions, which would otherwise grow with the size of the logarithms.
    """
    columns = key.columns
    possible = (columns.log_base > -np.inf) & (columns.log_fresh > -np.inf)
    reference = key.now
    if key.decay.factorises and possible.any():
        reference = columns.since[possible].max()
    log_decay = key.decay.log_factor(np.maximum(reference - columns.since, 0.0))
    with np.errstate(invalid="ignore"):
        high, low = _exact_sum(columns.log_base, columns.log_fresh)
        high, second_low = _exact_sum(high, log_decay)
        return high, low + second_low


def _exact_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Rounded sum and its rounding error (Knuth's TwoSum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def masses_of(log_priority: tuple[Floats, Floats], alpha: float) -> Floats:
    """``p**alpha`` over its maximum; exactly 0 where p is 0 (also for alpha 0) or the probability is negligible."""
    high, low = log_priority
    possible = high > -np.inf
    if not possible.any():
        return np.zeros_like(high)
    best = int(np.argmax(high))
    with np.errstate(invalid="ignore"):
        masses: Floats = np.exp(alpha * ((high - high[best]) + (low - low[best])))
    masses[~possible] = 0.0
    masses[masses < SMALLEST_PROBABILITY * masses.sum()] = 0.0
    return masses


def stratified(cumulative: Floats, uniforms: Floats) -> Integers:
    """Rows [n], increasing: one point in each of ``n`` equal slices of the total mass, with replacement.

    An entry of probability P comes up either floor or ceil of its share of whole slices, so its count differs from
    n P by less than 2, and its expectation is n P. Entries without mass are never drawn.
    Source: Schaul et al. 2016 (1511.05952), appendix B.2.1.

    Args:
        cumulative: float64 [N], running sum of masses, with a total above 0.
        uniforms: float64 [n] in [0, 1).
    """
    points = (np.arange(len(uniforms)) + uniforms) / len(uniforms) * cumulative[-1]
    last_with_mass = np.searchsorted(cumulative, cumulative[-1])
    # A point may round up to the total itself, which lies past the last entry.
    rows: Integers = np.minimum(np.searchsorted(cumulative, points, side="right"), last_with_mass)
    return rows


def importance_weights(probabilities: Floats, beta: float) -> Floats:
    """``(N P)**-beta`` over its maximum in the draw (N cancels): float64 [n] in (0, 1], the rarest entry has 1.

    Source: Schaul et al. 2016 (1511.05952), section 3.4.
    """
    weights: Floats = (probabilities.min() / probabilities) ** beta
    return weights
