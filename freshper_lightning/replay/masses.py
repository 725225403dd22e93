"""From priorities to masses: ``p**alpha`` of every row up to a common factor, kept exact as rows and clock change."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from freshper_lightning.replay.columns import Columns, Floats, Integers
from freshper_lightning.replay.decay import Decay, NoDecay, log_freshness
from freshper_lightning.replay.tree import BLOCK, BlockSums

SMALLEST_PROBABILITY = 1e-290
"""A probability below this is exactly 0; above it, it has full precision."""
LOWEST_TOTAL, HIGHEST_TOTAL = 2.0**-20, 2.0**38
"""While the total lies between these, every mass that is not negligible, and every factor of it, is a normal number."""
_PIECE = 1 << 14
"""Rows that are evaluated at a time, so that intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What masses are relative to: ``mass = (p(reference) / exp(high + low))**alpha``."""

    reference: float = 0.0
    """Clock value that a decay which factorises counts from."""
    high: float = 0.0
    low: float = 0.0
    """Together the log priority of mass 1, as an unevaluated sum."""


@dataclass(frozen=True, slots=True)
class Masses:
    """The sampling distribution of one moment."""

    sums: BlockSums
    scale: Scale

    @property
    def total(self) -> float:
        """Sum of all masses; 0 where nothing can be drawn."""
        return self.sums.total

    def of(self, rows: Integers) -> Floats:
        """float64 [n]: masses of rows; exactly 0 where the probability is negligible."""
        masses = self.sums.masses[rows]
        masses[masses < SMALLEST_PROBABILITY * self.total] = 0.0
        return masses


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that the masses of a moment are a function of; equal moments have masses that are equal to the bit."""

    version: int
    """Number of changes to the content so far."""
    now: float
    alpha: float
    decay: Decay


class Version:
    """Number of changes to the content; counted up before each of them."""

    def __init__(self) -> None:
        self.value = 0


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Inputs of :func:`evaluate`. The arrays are those in use: what comes of them counts while the version is the same.

    Nothing is copied or locked. Whoever changes the content counts the version up first, so that a reader who finds the
    version unchanged after reading has read unchanged content.
    """

    moment: Moment
    version: Version
    columns: tuple[Floats, Floats, Floats]
    """log base, log fresh and since."""
    static: Floats
    scale: Scale
    start: int
    end: int

    def is_current(self) -> bool:
        """Whether the content is still the one that was asked about."""
        return self.version.value == self.moment.version


def evaluate(request: Request) -> Masses:
    """Masses under a decay that does not factorise: what does not depend on the clock, times the decay; O(N)."""
    moment, since = request.moment, request.columns[2]
    masses = np.zeros(max(-(-request.end // BLOCK), 1) * BLOCK)
    for first in range(request.start, request.end, _PIECE):
        piece = slice(first, min(first + _PIECE, request.end))
        log_factor = log_freshness(moment.decay, moment.now - since[piece])
        masses[piece] = request.static[piece] * _power(log_factor, moment.alpha)
    sums = BlockSums(masses)
    if sums.total < LOWEST_TOTAL and request.static[request.start : request.end].any():
        return _from_logarithms(request)
    return Masses(sums, Scale(moment.now, request.scale.high, request.scale.low))


def _power(log_factor: Floats, alpha: float) -> Floats:
    """``factor**alpha``, where 0**0 is 0."""
    if alpha == 0:
        return (log_factor > -np.inf).astype(np.float64)
    result: Floats = np.exp(alpha * log_factor)
    return result


def _from_logarithms(request: Request) -> Masses:
    """The same where the best entries have decayed so far that others, once negligible, are not any more."""
    log_base, log_fresh, since = (column[request.start : request.end] for column in request.columns)
    moment = request.moment
    with np.errstate(invalid="ignore"):
        high, low = exact_sum(log_base, log_fresh)
        high, second = exact_sum(high, log_freshness(moment.decay, moment.now - since))
        low = low + second
    return _relative_to_best(high, low, moment, request.start)


def _relative_to_best(high: Floats, low: Floats, moment: Moment, start: int) -> Masses:
    masses, possible = np.zeros(start + len(high)), high > -np.inf
    if not possible.any():
        return Masses(BlockSums(masses), Scale(moment.now))
    best = int(np.argmax(np.where(possible, high, -np.inf)))
    scale = Scale(moment.now, float(high[best]), float(low[best]))
    masses[start:][possible] = _relative(high[possible], low[possible], scale, moment.alpha)
    return Masses(BlockSums(masses), scale)


def _relative(high: Floats, low: Floats, scale: Scale, alpha: float) -> Floats:
    with np.errstate(invalid="ignore", over="ignore"):
        masses: Floats = np.exp(alpha * ((high - scale.high) + (low - scale.low)))
    return masses


def exact_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Rounded sum and its rounding error (Knuth's TwoSum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


class StaticMasses:
    """Masses of all rows without what the clock changes; a change of some rows costs these rows only.

    Under a decay that factorises this is the whole distribution: the age common to all entries cancels, and nothing has
    to be done as time goes by. Masses are relative to a scale, which is renewed, at the cost of one look at every row,
    whenever the total leaves the range in which they are exact. They depend on content, parameters and scale alone.
    """

    def __init__(self, columns: Columns, version: Version) -> None:
        self._columns = columns
        self.version = version
        self.scale = Scale()
        self.sums = BlockSums(np.empty(0))
        self._alpha = 0.0
        self._decay: Decay | None = None
        self._latest: tuple[Moment, Masses] | None = None

    def adjust(self, alpha: float, decay: Decay) -> None:
        """Takes over parameters; what is known under others is evaluated anew."""
        if (alpha, decay) != (self._alpha, self._decay):
            self.version.value += 1
            self._alpha, self._decay = alpha, decay
            self._renew_scale()

    def rows_changed(self, rows: Integers) -> None:
        """Evaluates rows that are new, changed or dead."""
        self.sums.write(rows, self._evaluated(rows), self._columns.end)
        self._keep_in_range()

    def all_changed(self, scale: Scale) -> None:
        """Evaluates every row, relative to ``scale`` where that is possible."""
        self.scale = scale
        rows = self._columns.live_rows()
        masses = np.zeros(self._columns.end)
        masses[rows] = self._evaluated(rows)
        self.sums = BlockSums(masses)
        self._keep_in_range()

    def at(self, now: float, published: Callable[[Moment], Masses | None]) -> Masses:
        """The distribution at a moment: known, ``published`` by someone who has evaluated it, or evaluated here."""
        decay = self._known_decay()
        if decay.factorises:
            return Masses(self.sums, self.scale)
        moment = Moment(self.version.value, now, self._alpha, decay)
        if self._latest is None or self._latest[0] != moment:
            self._latest = moment, published(moment) or evaluate(self.request(now))
        return self._latest[1]

    def request(self, now: float) -> Request:
        """What a thread needs to evaluate the distribution at a moment."""
        columns = self._columns
        return Request(
            Moment(self.version.value, now, self._alpha, self._known_decay()),
            self.version,
            (columns.log_base, columns.log_fresh, columns.since),
            self.sums.masses,
            self.scale,
            columns.start,
            columns.end,
        )

    def _known_decay(self) -> Decay:
        assert self._decay is not None, "parameters are taken over before anything is evaluated"
        return self._decay

    def _log_priorities(self, rows: Integers, reference: float) -> tuple[Floats, Floats]:
        """Log priority of each row [n] as an unevaluated sum; the low part is what additions round off."""
        columns, decay = self._columns, self._known_decay()
        with np.errstate(invalid="ignore", over="ignore"):
            high, low = exact_sum(columns.log_base[rows], columns.log_fresh[rows])
            if decay.factorises and type(decay).log_factor is not NoDecay.log_factor:
                high, second = exact_sum(high, log_freshness(decay, reference - columns.since[rows]))
                low = low + second
        return high, low

    def _evaluated(self, rows: Integers) -> Floats:
        high, low = self._log_priorities(rows, self.scale.reference)
        masses = _relative(high, low, self.scale, self._alpha)
        masses[~(high > -np.inf)] = 0.0
        return masses

    def _possible_rows(self) -> Integers:
        rows, columns = self._columns.live_rows(), self._columns
        possible: Integers = rows[(columns.log_base[rows] > -np.inf) & (columns.log_fresh[rows] > -np.inf)]
        return possible

    def _keep_in_range(self) -> None:
        if LOWEST_TOTAL <= self.sums.total <= HIGHEST_TOTAL:
            return
        if self.sums.total != 0 or len(self._possible_rows()):
            self._renew_scale()

    def _renew_scale(self) -> None:
        """Makes the greatest mass 1, and its entry the reference: its age, and those of all like it, are then small.

        The logarithm of a decay over a very long time is too coarse a number to compare entries by.
        """
        rows = self._possible_rows()
        if len(rows):
            reference = float(self._columns.since[rows].max())
            high, _ = self._log_priorities(rows, reference)
            reference = float(self._columns.since[rows[np.argmax(high)]])
            high, low = self._log_priorities(rows, reference)
            best = int(np.argmax(high))
            self.scale = Scale(reference, float(high[best]), float(low[best]))
        masses = np.zeros(self._columns.end)
        masses[rows] = self._evaluated(rows)
        self.sums = BlockSums(masses)
