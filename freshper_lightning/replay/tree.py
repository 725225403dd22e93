"""Sums over blocks of masses: a change costs its blocks, and a draw one block on each level."""

import math
from itertools import pairwise

import numpy as np

from freshper_lightning.replay.columns import Floats, Integers, enlarged

BLOCK = 16
TOP = 4096
"""A draw adds up so many numbers one after the other; where there are more, it adds up the sums of blocks."""
_FEW = 512
"""For so many rows, adding up a block several times takes less time than finding out which rows share one."""


class BlockSums:
    """Non-negative masses by row, with sums of blocks of rows, of blocks of these sums, and so on.

    A sum is always taken over its whole block, never adjusted by a difference. So the sums are a function of the masses
    alone, equal to the bit however they came about, and rounding errors do not build up.
    """

    total: float
    """Sum of all masses."""

    def __init__(self, masses: Floats) -> None:
        self._levels = [_whole_blocks(masses)]
        self._used = len(self.masses)
        self._complete()

    @property
    def masses(self) -> Floats:
        """float64, zeros behind the last row."""
        return self._levels[0]

    @property
    def allocated(self) -> int:
        """Bytes that are held."""
        return sum(level.nbytes for level in self._levels)

    def write(self, rows: Integers, masses: Floats, end: int) -> None:
        """Replaces masses, where ``end``, the number of rows from now on, never falls."""
        if _blocks(end) * BLOCK > self._used:
            self._used = _blocks(end) * BLOCK
            for depth, level in enumerate(self._levels):
                self._levels[depth] = enlarged(level, len(level), _blocks(self._count(depth)) * BLOCK)
        self.masses[rows] = masses
        for below, above in pairwise(self._levels):
            rows = rows // BLOCK if len(rows) <= _FEW else np.unique(rows // BLOCK)
            above[rows] = below.reshape(-1, BLOCK).take(rows, axis=0).sum(axis=1)
        self._complete()

    def _count(self, depth: int) -> int:
        """Numbers in use on a level."""
        count: int = -(-self._used // BLOCK**depth)
        return count

    def _complete(self) -> None:
        """Adds levels until the last is short, and adds that one up."""
        while self._count(len(self._levels) - 1) > TOP:
            self._levels.append(_whole_blocks(self._levels[-1].reshape(-1, BLOCK).sum(axis=1)))
        self.total = float(self._top().sum())

    def _top(self) -> Floats:
        # In use only: how a sum is rounded depends on the number of its terms, zeros included.
        return self._levels[-1][: self._count(len(self._levels) - 1)]

    def find(self, shares: Floats) -> Integers:
        """Rows [n] in which the running sum of masses passes the given shares [n] of it; never one without mass.

        Args:
            shares: float64 [n] in [0, 1].
        """
        running = _running(self._top())
        end = float(running[-1])
        points = np.minimum(shares * end, math.nextafter(end, 0.0))
        rows: Integers = running[1:].searchsorted(points, side="right")
        each = np.arange(len(rows))
        taken: tuple[Integers, ...] = (rows,)
        for level in reversed(self._levels[:-1]):
            points = points - running[taken]
            running = _running(level.reshape(-1, BLOCK).take(rows, axis=0))
            # Where the sums of two levels are rounded apart, a point may lie past the end of its block.
            points = np.minimum(points, np.nextafter(running[:, -1], 0.0))
            chosen = (running[:, 1:] > points[:, None]).argmax(axis=1)
            taken = (each, chosen)
            rows = rows * BLOCK + chosen
        return rows


def _blocks(count: int) -> int:
    return max(-(-count // BLOCK), 1)


def _whole_blocks(numbers: Floats) -> Floats:
    """The numbers, with as many zeros behind them as whole blocks ask for."""
    size = _blocks(len(numbers)) * BLOCK
    return numbers if len(numbers) == size else np.concatenate([numbers, np.zeros(size - len(numbers))])


def _running(numbers: Floats) -> Floats:
    """Running sums along the last axis, from 0."""
    sums = np.zeros((*numbers.shape[:-1], numbers.shape[-1] + 1))
    numbers.cumsum(axis=-1, out=sums[..., 1:])
    return sums
