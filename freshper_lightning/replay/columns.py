"""The numbers that priorities are made of, one row per stored trajectory."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What the priorities of the ``N`` stored trajectories depend on; never modified, only replaced.

    Immutability makes it safe to hand to a thread without a lock, and makes identity the version of the content: the
    same object always describes the same entries.
    """

    ids: Integers
    """int64 [N], increasing."""
    log_base: Floats
    """float64 [N]: logarithm of the base priority; ``-inf`` for 0."""
    log_fresh: Floats
    """float64 [N]: log freshness that was measured at ``since``; at most 0."""
    since: Floats
    """float64 [N]: clock value from which the decay counts."""

    def __post_init__(self) -> None:
        for column in self._all():
            if column.shape != self.ids.shape:
                raise ValueError(f"a column has shape {column.shape} where there are {self.ids.shape} ids")
            column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.ids)

    def _all(self) -> tuple[Integers, Floats, Floats, Floats]:
        return self.ids, self.log_base, self.log_fresh, self.since

    @staticmethod
    def empty() -> "Columns":
        """No entries."""
        return Columns(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return len(self) * self.row_nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return sum(column.itemsize for column in self._all())

    def newest(self) -> float:
        """Greatest value of ``since``; ``-inf`` without entries."""
        return float(self.since.max(initial=-np.inf))

    def followed_by(self, ids: Integers, base: Floats, since: float) -> "Columns":
        """These entries and new ones, which are fully fresh and have their own base priorities."""
        return Columns(
            np.concatenate([self.ids, ids]),
            np.concatenate([self.log_base, _log(base)]),
            np.concatenate([self.log_fresh, np.zeros(len(ids))]),
            np.concatenate([self.since, np.full(len(ids), since)]),
        )

    def without_oldest(self, count: int) -> "Columns":
        """These entries without the ``count`` smallest ids."""
        kept = slice(count, None)
        return Columns(self.ids[kept], self.log_base[kept], self.log_fresh[kept], self.since[kept])

    def with_base(self, rows: Integers, base: Floats) -> "Columns":
        """Base priorities of ``rows`` replaced; of a row named twice the last value stays."""
        return replace(self, log_base=_written(self.log_base, rows, _log(base)))

    def with_fresh(self, rows: Integers, log_fresh: Floats, since: float) -> "Columns":
        """Freshness of ``rows`` replaced by what was measured when the clock stood at ``since``."""
        return replace(
            self,
            log_fresh=_written(self.log_fresh, rows, log_fresh),
            since=_written(self.since, rows, np.full(len(rows), since)),
        )

    def rows_of(self, ids: Integers) -> tuple[Integers, NDArray[np.bool_]]:
        """Row of each id [n], and whether the id is stored; where it is not, the row means nothing."""
        if len(self) == 0:
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        rows = np.minimum(np.searchsorted(self.ids, ids), len(self) - 1)
        return rows, self.ids[rows] == ids


def _log(base: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(base)


def _written(column: Floats, rows: Integers, values: Floats) -> Floats:
    column = column.copy()
    column[rows] = values
    return column
