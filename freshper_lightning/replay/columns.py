"""The numbers that are kept for each stored trajectory, one row each, oldest first."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper_lightning.replay.requirements import ids_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_TYPES: dict[str, type[np.generic]] = {
    "ids": np.int64,
    "handles": np.int64,
    "groups": np.int64,
    "log_base": np.float64,
    "log_fresh": np.float64,
    "since": np.float64,
    "added": np.float64,
    "draws": np.int64,
    "pinned": np.bool_,
    "live": np.bool_,
}
SAVED_TYPES = {name: kind for name, kind in _TYPES.items() if name not in ("handles", "live")} | {"rows": np.int64}
"""Type of every column of a saved state."""
_MOST_DEAD = 1024
"""So many rows may be dead whatever the number of live ones."""


def enlarged(array: NDArray[_Scalar], used: int, needed: int) -> NDArray[_Scalar]:
    """The array, or a copy of its first ``used`` entries with room for at least ``needed``, zeros behind them."""
    if needed <= len(array):
        return array
    larger = np.zeros(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


class Columns:
    """Rows in the order of their ids, which is the order in which trajectories came in.

    Only rows below ``end`` mean anything. A row dies where it is: numbers of rows stay the same until :meth:`compact`,
    and a dead row keeps its id, so that ids stay sorted. Which rows are dead is part of a saved state, since sums over
    rows are rounded in the order of rows.
    """

    ids: Integers
    """int64, increasing."""
    handles: Integers
    """int64: where the trajectory is."""
    groups: Integers
    """int64: the trajectory's group."""
    log_base: Floats
    """float64: logarithm of the base priority; ``-inf`` for 0, and for what is not stored."""
    log_fresh: Floats
    """float64: log freshness that was measured at ``since``; at most 0."""
    since: Floats
    """float64: clock value from which the decay counts."""
    added: Floats
    """float64: clock value at which the trajectory came in; never decreasing."""
    draws: Integers
    """int64: how many times the trajectory was drawn."""
    pinned: Flags
    """bool: whether the trajectory must not be evicted."""
    live: Flags
    """bool: whether the trajectory is stored."""

    def __init__(self) -> None:
        for name, kind in _TYPES.items():
            setattr(self, name, np.empty(0, kind))
        self.start = 0
        """No row before this one is live."""
        self.end = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    ROW_BYTES = sum(np.dtype(kind).itemsize for kind in _TYPES.values())
    """Bytes of one row."""

    @property
    def allocated(self) -> int:
        """Bytes that are held for rows, used or not."""
        return sum(getattr(self, name).nbytes for name in _TYPES)

    def live_rows(self) -> Integers:
        """int64 [N]: rows of what is stored, oldest first."""
        return self.start + np.flatnonzero(self.live[self.start : self.end])

    def append(self, ids: Integers, handles: Integers, groups: Integers, base: Floats, now: float) -> Integers:
        """Adds fully fresh entries and returns their rows."""
        rows = np.arange(self.end, self.end + len(ids))
        for name in _TYPES:
            setattr(self, name, enlarged(getattr(self, name), self.end, self.end + len(ids)))
        added = slice(self.end, self.end + len(ids))
        self.ids[added], self.handles[added], self.groups[added] = ids, handles, groups
        self.log_base[added], self.log_fresh[added] = log_of(base), 0.0
        self.since[added], self.added[added], self.draws[added] = now, now, 0
        self.pinned[added], self.live[added] = False, True
        self.end += len(ids)
        self._size += len(ids)
        return rows

    def remove(self, rows: Integers) -> None:
        """Lets live rows die."""
        self.live[rows], self.pinned[rows] = False, False
        self.log_base[rows] = -np.inf
        self._size -= len(rows)
        while self.start < self.end and not self.live[self.start]:
            block = self.live[self.start : min(self.start + _MOST_DEAD, self.end)]
            self.start += int(np.argmax(block)) if block.any() else len(block)

    def compact(self) -> bool:
        """Moves live rows together once most rows are dead; returns whether rows have moved."""
        if self.end - len(self) <= max(len(self), _MOST_DEAD):
            return False
        rows = self.live_rows()
        for name in _TYPES:
            column = getattr(self, name)
            column[: len(rows)] = column[rows]
        self.start, self.end = 0, len(rows)
        return True

    def rows_of(self, ids: Integers) -> tuple[Integers, Flags]:
        """Row of each id [n], and whether it is stored; where it is not, the row means nothing."""
        if self.end == 0:
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        # Where no row between others was ever removed, ids count up by one.
        rows = np.minimum(np.maximum(ids - self.ids[0], 0), self.end - 1)
        # A dead row may bear the id of a live one; see :meth:`load`.
        found = (self.ids[rows] == ids) & self.live[rows]
        if np.count_nonzero(found) < len(ids):
            rows = np.minimum(np.searchsorted(self.ids[: self.end], ids), self.end - 1)
            found = (self.ids[rows] == ids) & self.live[rows]
        return rows, found

    def stored_rows(self, ids: ArrayLike, count: int) -> tuple[Integers, Flags]:
        """Rows of those of ``count`` ids that are stored, and which of them are.

        Raises:
            ValueError: There is another number of ids, or they are not integers.
        """
        wanted = ids_of(ids)
        if wanted.shape != (count,):
            raise ValueError(f"ids and values must be two sequences of one length, not {wanted.shape} and ({count},)")
        rows, stored = self.rows_of(wanted)
        return rows[stored], stored

    def known_rows(self, ids: ArrayLike) -> Integers:
        """Row of each id [n].

        Raises:
            KeyError: An id is not stored; the message names it.
            ValueError: They are not integers in one sequence.
        """
        wanted = ids_of(ids)
        rows, stored = self.rows_of(wanted)
        if not stored.all():
            raise KeyError(int(wanted[~stored][0]))
        return rows

    def packed(self) -> dict[str, NDArray[np.generic]]:
        """Live rows by column, with their row numbers; handles and flags that follow are left out."""
        rows = self.live_rows()
        return {name: getattr(self, name)[rows] for name in SAVED_TYPES if name != "rows"} | {"rows": rows}

    def load(self, packed: dict[str, NDArray[np.generic]], handles: Integers, end: int) -> None:
        """Fills empty columns with what :meth:`packed` returned."""
        rows = packed["rows"]
        for name, kind in _TYPES.items():
            column = np.zeros(end, kind)
            if name in packed:
                column[rows] = packed[name]
            setattr(self, name, column)
        self.handles[rows], self.live[rows] = handles, True
        self.log_base[~self.live] = -np.inf
        # A dead row gets the id and time of the live one before it: they stay sorted, and nothing is found there.
        self.ids = np.maximum.accumulate(np.where(self.live, self.ids, -1))
        self.added = np.maximum.accumulate(np.where(self.live, self.added, -np.inf))
        self.start, self.end, self._size = int(rows[0]) if len(rows) else end, end, len(rows)


def log_of(base: Floats) -> Floats:
    """Natural logarithm, ``-inf`` for 0."""
    with np.errstate(divide="ignore"):
        logarithm: Floats = np.log(base)
    return logarithm
