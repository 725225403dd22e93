"""Where bytes lie: blocks of any length in a few large pieces of memory, or of a mapped file."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freshper_lightning.replay.codec import ALIGNMENT, Bytes
from freshper_lightning.replay.columns import Integers, enlarged

SMALLEST_SEGMENT = 1 << 16
LARGEST_SEGMENT = 1 << 26
"""Bytes that are allocated at a time, at least (but for a larger block) and at most."""
_SHARE = 32
"""Between these a segment is one part in so many of what is alive, and so is the room that is not used."""
_MOST_DEAD = 4
"""Dead blocks take at most one part in so many of what is alive."""


def allocate(size: int, directory: Path | None) -> Bytes:
    """uint8 [size]: memory, or a file without a name in ``directory``, which vanishes with its last user.

    Raises:
        OSError: The disk is too full.
    """
    if directory is None or size == 0:
        return np.empty(size, np.uint8)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # Without room for all of it a later write would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, np.uint8, "r+", shape=(size,)))


@dataclass(slots=True)
class _Segment:
    buffer: Bytes
    used: int = 0
    live: int = 0

    @property
    def room(self) -> int:
        return len(self.buffer) - self.used

    @property
    def dead(self) -> int:
        return self.used - self.live


class Arena:
    """Blocks by handle; what is written is never changed, and memory follows what is alive.

    Segments are filled one after the other, and freed when nothing in them is alive. Should what is dead in the filled
    ones exceed a quarter of what is alive, those with most of it are copied together, so that dead blocks never take
    more than that. Where the oldest go first nothing is ever copied. Handles of freed blocks are given again.

    Args:
        directory: Where segments are mapped files instead of memory, for content larger than memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._segments: dict[int, _Segment] = {}
        self._current = -1
        self._free: list[int] = []
        self._segment: NDArray[np.int32] = np.empty(0, np.int32)
        self._offset: Integers = np.empty(0, np.int64)
        self._size: Integers = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._segment) - len(self._free)

    HANDLE_BYTES = 20
    """Bytes that are kept for each block besides its content."""

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are alive."""
        return sum(segment.live for segment in self._segments.values())

    @property
    def allocated(self) -> int:
        """Bytes that are held for blocks and handles, used or not."""
        handles = self._segment.nbytes + self._offset.nbytes + self._size.nbytes
        return sum(len(segment.buffer) for segment in self._segments.values()) + handles

    def append(self, flat: Bytes, sizes: Integers) -> Integers:
        """Copies blocks in.

        Args:
            flat: uint8 [sum of sizes]: the blocks one after the other.
            sizes: int64 [n], multiples of ``ALIGNMENT`` above 0.

        Returns:
            int64 [n]: handles.

        Raises:
            OSError: The disk is too full; nothing has changed.
        """
        if len(sizes) and (int(sizes.min()) <= 0 or (sizes % ALIGNMENT).any() or int(sizes.sum()) != len(flat)):
            raise ValueError(f"sizes of blocks must be multiples of {ALIGNMENT} and add up to {len(flat)} bytes")
        pieces, filled = self._pieces(sizes), self._current
        handles = self._new_handles(len(sizes))
        self._place(pieces, handles, flat, sizes)
        if filled != self._current:
            self._tidy()
        return handles

    def _new_handles(self, count: int) -> Integers:
        known = len(self._segment)
        fresh = max(0, count - len(self._free))
        reused = [self._free.pop() for _ in range(count - fresh)]
        for name in ("_segment", "_offset", "_size") if fresh else ():
            setattr(self, name, enlarged(getattr(self, name), known, known + fresh))
        spare = range(known + fresh, len(self._segment))
        self._segment[known + fresh :] = -1
        self._free.extend(reversed(spare))
        return np.array([*reused, *range(known, known + fresh)], np.int64)

    def _pieces(self, sizes: Integers) -> list[tuple[_Segment, int]]:
        """Segments that will take the blocks, the one being filled first, each with the end of its part of them.

        All that has to be allocated is, and nothing has changed if that fails.
        """
        ends, pieces, first, base = np.cumsum(sizes), [], 0, 0
        segment = self._segments.get(self._current)
        while first < len(sizes):
            if segment is None or segment.room < sizes[first]:
                segment = self._new_segment(int(sizes[first]), self.nbytes + base)
            last = int(np.searchsorted(ends, base + segment.room, side="right"))
            pieces.append((segment, last))
            first, base, segment = last, int(ends[last - 1]), None
        return pieces

    def _new_segment(self, size: int, alive: int) -> _Segment:
        usual = min(max(alive // _SHARE // ALIGNMENT * ALIGNMENT, SMALLEST_SEGMENT), LARGEST_SEGMENT)
        return _Segment(allocate(max(size, usual), self._directory))

    def _place(self, pieces: list[tuple[_Segment, int]], handles: Integers, flat: Bytes, sizes: Integers) -> None:
        ends, first, base = np.cumsum(sizes), 0, 0
        for segment, last in pieces:
            if segment is not self._segments.get(self._current):
                self._current += 1
                self._segments[self._current] = segment
            length = int(ends[last - 1]) - base
            segment.buffer[segment.used : segment.used + length] = flat[base : base + length]
            self._segment[handles[first:last]] = self._current
            self._offset[handles[first:last]] = segment.used + ends[first:last] - sizes[first:last] - base
            self._size[handles[first:last]] = sizes[first:last]
            segment.used += length
            segment.live += length
            first, base = last, base + length

    def view(self, handle: int) -> Bytes:
        """The block, where it lies; valid until the arena changes, and not to be written."""
        start = int(self._offset[handle])
        return self._segments[int(self._segment[handle])].buffer[start : start + int(self._size[handle])]

    def size(self, handle: int) -> int:
        """Bytes of the block."""
        return int(self._size[handle])

    def read(self, handles: Integers) -> list[Bytes]:
        """Copies of blocks."""
        where = zip(
            self._segment[handles].tolist(), self._offset[handles].tolist(), self.sizes(handles).tolist(), strict=True
        )
        return [self._segments[segment].buffer[start : start + size].copy() for segment, start, size in where]

    def sizes(self, handles: Integers) -> Integers:
        """int64 [n]: bytes of each block."""
        return self._size[handles]

    def gather(self, handles: Integers) -> Bytes:
        """The blocks one after the other, in one piece that nothing else uses."""
        flat, at = allocate(int(self._size[handles].sum()), self._directory), 0
        for segment, start, length in self._runs(handles):
            flat[at : at + length] = self._segments[segment].buffer[start : start + length]
            at += length
        return flat

    def _runs(self, handles: Integers) -> Iterator[tuple[int, int, int]]:
        """Segment, start and length of pieces that lie in one."""
        if len(handles) == 0:
            return iter(())
        segment, start, size = self._segment[handles], self._offset[handles], self._size[handles]
        broken = (segment[1:] != segment[:-1]) | (start[1:] != start[:-1] + size[:-1])
        first = np.concatenate([[0], np.flatnonzero(broken) + 1])
        lengths = np.add.reduceat(size, first)
        return zip(segment[first].tolist(), start[first].tolist(), lengths.tolist(), strict=True)

    def free(self, handles: Integers) -> None:
        """Ends the life of blocks."""
        segments, sizes = self._segment[handles], self._size[handles]
        self._segment[handles] = -1
        self._free.extend(handles.tolist())
        for key in np.unique(segments).tolist():
            self._segments[key].live -= int(sizes[segments == key].sum())
            if self._segments[key].live == 0:
                del self._segments[key]
        self._tidy()

    def _tidy(self) -> None:
        alive = self.nbytes
        while True:
            dead = {key: segment.dead for key, segment in self._segments.items() if key != self._current}
            if _MOST_DEAD * sum(dead.values()) <= alive:
                return
            worst = max(dead, key=lambda key: dead[key] / self._segments[key].used)
            if not self._copy_together(worst):
                return

    def _copy_together(self, key: int) -> bool:
        """Whether there was room for it; a disk that is full leaves the segment as it is until the next time."""
        handles = np.flatnonzero(self._segment == key)
        handles = handles[np.argsort(self._offset[handles])]
        sizes, flat = self._size[handles], np.concatenate(self.read(handles))
        try:
            pieces = self._pieces(sizes)
        except OSError:
            return False
        del self._segments[key]
        self._place(pieces, handles, flat, sizes)
        return True
