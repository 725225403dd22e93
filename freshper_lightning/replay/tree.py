"""Sums over blocks of masses: a change costs its block, and a draw costs the number of blocks."""

import numpy as np

from freshper_lightning.replay.columns import Floats, Integers, enlarged

BLOCK = 32


class BlockSums:
    """Non-negative masses by row, with the sum of every block of rows.

    A sum is always taken over its whole block, never adjusted by a difference. So the sums are a function of the masses
    alone, equal to the bit however they came about, and rounding errors do not build up.
    """

    def __init__(self, masses: Floats) -> None:
        size = max(-(-len(masses) // BLOCK), 1) * BLOCK
        self.masses = masses if len(masses) == size else np.concatenate([masses, np.zeros(size - len(masses))])
        """float64, zeros behind the last row."""
        self._sums = _sums_of(self.masses)
        self._used = len(self._sums)
        self.total = float(self._sums.sum())
        """Sum of all masses."""

    @property
    def allocated(self) -> int:
        """Bytes that are held."""
        return self.masses.nbytes + self._sums.nbytes

    def write(self, rows: Integers, masses: Floats, end: int) -> None:
        """Replaces masses, where ``end``, the number of rows from now on, never falls."""
        self._used = max(-(-end // BLOCK), 1)
        self.masses = enlarged(self.masses, len(self.masses), self._used * BLOCK)
        self._sums = enlarged(self._sums, len(self._sums), self._used)
        self.masses[rows] = masses
        blocks = np.unique(rows // BLOCK)
        self._sums[blocks] = _sums_of(self.masses, blocks)
        # Over the blocks in use only: how a sum is rounded depends on the number of its terms, zeros included.
        self.total = float(self._sums[: self._used].sum())

    def find(self, shares: Floats) -> Integers:
        """Rows [n] in which the running sum of masses passes the given shares [n] of it; never one without mass.

        Args:
            shares: float64 [n] in [0, 1].
        """
        running = self._sums[: self._used].cumsum()
        points = shares * running[-1]
        blocks = running.searchsorted(_below(points, running[-1]), side="right")
        inside = self.masses.reshape(-1, BLOCK)[blocks].cumsum(axis=1)
        before = np.where(blocks > 0, running[blocks - 1], 0.0)
        # Where the two sums are rounded apart, a point may lie past the end of its block.
        points = _below(points - before, inside[:, -1])
        rows: Integers = blocks * BLOCK + (inside > points[:, None]).argmax(axis=1)
        return rows


def _below(points: Floats, ends: Floats) -> Floats:
    """The points, or the last number below their end."""
    below: Floats = np.minimum(points, np.nextafter(ends, 0.0))
    return below


def _sums_of(masses: Floats, blocks: Integers | None = None) -> Floats:
    by_block = masses.reshape(-1, BLOCK)
    sums: Floats = (by_block if blocks is None else by_block[blocks]).sum(axis=1)
    return sums
