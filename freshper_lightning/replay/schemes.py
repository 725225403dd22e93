"""Draws: which rows make up a batch, and how often each could be expected in it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from freshper_lightning.replay.columns import Columns, Floats, Integers
from freshper_lightning.replay.masses import Masses

DrawName = Literal["stratified", "gumbel", "groups", "newest", "oldest"]


class NothingToDraw(RuntimeError):  # noqa: N818 - a state of the buffer, which the caller answers by skipping an update
    """Nothing has a priority above 0, or not enough for a batch without repetition."""


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """Rows of a batch and the numbers that its importance weights follow from."""

    rows: Integers
    """int64 [n]."""
    shares: Floats
    """float64 [n]: the probability P of each, out of what this draw chooses from."""
    expected: Floats
    """float64 [n]: expected number of times in the batch: n P with replacement, less for likely ones without."""
    total: float
    """Sum of the masses that this draw chooses from."""


class DrawScheme(ABC):
    """A way to choose ``n`` rows; a pure function of masses, rows and the random generator."""

    by_mass: ClassVar[bool] = True
    """Whether more mass means more draws; otherwise buffers of several ranks count alike."""

    @abstractmethod
    def total(self, masses: Masses, columns: Columns) -> float:
        """Sum of the masses that are chosen from; 0 where there is nothing."""

    @abstractmethod
    def pick(self, masses: Masses, columns: Columns, n: int, random: np.random.Generator) -> Picked:
        """Chooses ``n`` rows.

        Raises:
            NothingToDraw: There are not enough entries with a mass.
            ValueError: ``n`` is not possible in any state of the buffer.
        """


@dataclass(frozen=True)
class Stratified(DrawScheme):
    """One point in each of ``n`` equal slices of the total mass, with replacement.

    An entry of probability P comes up floor or ceil of its share of whole slices, so its count differs from n P by less
    than 2, and its expectation is n P.
    Source: Schaul et al. 2016 (1511.05952), appendix B.2.1.
    """

    def total(self, masses: Masses, columns: Columns) -> float:
        """All of it."""
        return masses.total

    def pick(self, masses: Masses, columns: Columns, n: int, random: np.random.Generator) -> Picked:
        """Rows in increasing order."""
        _require_some(masses, columns)
        points = (np.arange(n) + random.random(n)) / n
        rows = masses.sums.find(points)
        found = masses.of(rows)
        if np.count_nonzero(found) < n:  # a point has met a mass that counts as none
            rows = columns.live_rows()[stratified(masses.of(columns.live_rows()), points)]
            found = masses.of(rows)
        shares = found / masses.total
        return Picked(rows, shares, n * shares, masses.total)


@dataclass(frozen=True)
class GumbelTopK(DrawScheme):
    """The ``n`` greatest of log P + Gumbel noise: distinct entries, as if drawn one by one without replacement.

    Given the (n+1)-th greatest, kappa, an entry is among them with probability ``1 - exp(-exp(log P - kappa))``, and
    the inverse of that is an unbiased weight.
    Source: Kool et al. 2019 (1903.06059).
    """

    def total(self, masses: Masses, columns: Columns) -> float:
        """All of it."""
        return masses.total

    def pick(self, masses: Masses, columns: Columns, n: int, random: np.random.Generator) -> Picked:
        """Rows in increasing order, each once."""
        _require_some(masses, columns)
        rows = columns.live_rows()
        noise, mass = random.gumbel(size=len(rows)), masses.of(rows)
        rows, noise, shares = rows[mass > 0], noise[mass > 0], mass[mass > 0] / masses.total
        if n > len(rows):
            raise NothingToDraw(f"only {len(rows)} trajectories have a priority above 0, too few for {n} distinct ones")
        keys = np.log(shares) + noise
        order = np.argpartition(-keys, n) if n < len(rows) else np.arange(n)
        kappa = keys[order[n]] if n < len(rows) else -np.inf
        chosen = np.sort(order[:n])
        expected = -np.expm1(-np.exp(np.log(shares[chosen]) - kappa))
        return Picked(rows[chosen], shares[chosen], expected, masses.total)


@dataclass(frozen=True)
class WholeGroups(DrawScheme):
    """Groups, stratified and with replacement, by the mean or the greatest mass of their members, who all come along.

    Groups that have lost members are not drawn. All members of a group have its probability over its size, and so one
    weight.

    Raises:
        ValueError: ``mass`` is not one of the two, or ``size`` below 1.
    """

    mass: Literal["mean", "max"] = "mean"
    size: int | None = None
    """Members of a whole group; by default those of the largest one in the buffer."""

    def __post_init__(self) -> None:
        if self.mass not in ("mean", "max"):
            raise ValueError(f"mass of a group must be 'mean' or 'max', not {self.mass!r}")
        if self.size is not None and self.size < 1:
            raise ValueError(f"size of a group must be at least 1, or none, not {self.size}")

    def total(self, masses: Masses, columns: Columns) -> float:
        """Masses of whole groups."""
        return float(self._groups(masses, columns)[1].sum()) if len(columns) else 0.0

    def pick(self, masses: Masses, columns: Columns, n: int, random: np.random.Generator) -> Picked:
        """Members of a group follow one another, oldest first."""
        _require_some(masses, columns)
        members, mass = self._groups(masses, columns)
        size, total = members.shape[1], float(mass.sum())
        if n % size:
            raise ValueError(f"n must be a multiple of the group size, {size}, not {n}")
        if not total > 0:
            raise NothingToDraw("no whole group in the replay buffer has a priority above 0")
        count = n // size
        groups = stratified(mass, (np.arange(count) + random.random(count)) / count)
        shares = np.repeat(mass[groups] / (total * size), size)
        return Picked(members[groups].ravel(), shares, n * shares, total)

    def _groups(self, masses: Masses, columns: Columns) -> tuple[Integers, Floats]:
        """Rows [G, size] and masses [G] of all whole groups, by age of the first member."""
        rows = columns.live_rows()
        _, first, inverse, counts = np.unique(
            columns.groups[rows], return_index=True, return_inverse=True, return_counts=True
        )
        size = int(counts.max()) if self.size is None else self.size
        members = rows[np.argsort(inverse, kind="stable")]
        starts = np.cumsum(counts) - counts
        whole = np.flatnonzero(counts == size)
        whole = whole[np.argsort(first[whole])]
        members = members[starts[whole][:, None] + np.arange(size)]
        mass = masses.of(members.ravel()).reshape(members.shape)
        return members, mass.mean(axis=1) if self.mass == "mean" else mass.max(axis=1)


@dataclass(frozen=True)
class Newest(DrawScheme):
    """The ``n`` entries that came in last, of those with a priority above 0; priorities do not matter otherwise."""

    by_mass: ClassVar[bool] = False

    def total(self, masses: Masses, columns: Columns) -> float:
        """1 where there is any mass: all buffers count alike."""
        return float(masses.total > 0)

    def pick(self, masses: Masses, columns: Columns, n: int, random: np.random.Generator) -> Picked:
        """Rows in increasing order."""
        return _whole_range(masses, columns, slice(-n, None), n)


@dataclass(frozen=True)
class Oldest(DrawScheme):
    """The ``n`` entries that came in first, of those with a priority above 0; priorities do not matter otherwise."""

    by_mass: ClassVar[bool] = False

    def total(self, masses: Masses, columns: Columns) -> float:
        """1 where there is any mass: all buffers count alike."""
        return float(masses.total > 0)

    def pick(self, masses: Masses, columns: Columns, n: int, random: np.random.Generator) -> Picked:
        """Rows in increasing order."""
        return _whole_range(masses, columns, slice(n), n)


def _whole_range(masses: Masses, columns: Columns, part: slice, n: int) -> Picked:
    _require_some(masses, columns)
    rows = columns.live_rows()
    rows = rows[masses.of(rows) > 0]
    if n > len(rows):
        raise NothingToDraw(f"only {len(rows)} trajectories have a priority above 0, too few for {n} distinct ones")
    return Picked(rows[part], np.full(n, 1 / n), np.ones(n), 1.0)


def _require_some(masses: Masses, columns: Columns) -> None:
    if not masses.total > 0:
        raise NothingToDraw(f"none of {len(columns)} trajectories in the replay buffer has a priority above 0")


def stratified(masses: Floats, shares: Floats) -> Integers:
    """Index [n] at which the running sum of masses passes each share of the total; never one without mass."""
    running = np.cumsum(masses)
    last_with_mass = np.searchsorted(running, running[-1])
    found: Integers = np.minimum(np.searchsorted(running, shares * running[-1], side="right"), last_with_mass)
    return found


_SCHEMES: dict[str, DrawScheme] = {
    "stratified": Stratified(),
    "gumbel": GumbelTopK(),
    "groups": WholeGroups(),
    "newest": Newest(),
    "oldest": Oldest(),
}


def scheme_of(draw: DrawName | DrawScheme) -> DrawScheme:
    """The scheme of that name.

    Raises:
        ValueError: There is no such name.
    """
    if isinstance(draw, DrawScheme):
        return draw
    if draw not in _SCHEMES:
        raise ValueError(f"draw must be one of {', '.join(get_args(DrawName))}, or a DrawScheme, not {draw!r}")
    return _SCHEMES[draw]
