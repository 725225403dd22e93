"""What a replay buffer holds: rows, bytes and masses, changed together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshper_lightning.replay.codec import LogProbDtype
from freshper_lightning.replay.columns import Columns, Floats, Integers, log_of
from freshper_lightning.replay.decay import Decay
from freshper_lightning.replay.eviction import Eviction
from freshper_lightning.replay.masses import Scale, StaticMasses, Version
from freshper_lightning.replay.storage import Staged, TrajectoryStore
from freshper_lightning.replay.wholeness import checksum

ROW_BYTES = Columns.ROW_BYTES + 8
"""Bytes of a trajectory's row, with its mass."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much content there may be."""

    capacity: int
    max_bytes: int | None


class NoRoom(ValueError):  # noqa: N818 - says what the caller asked for
    """What is pinned leaves too little room."""


class Content:
    """Trajectories with their rows and masses; every method leaves the three in agreement.

    Args:
        version: Counted up before every change.
        log_probs: How log-probabilities are stored.
        directory: Where bytes are kept in mapped files instead of memory.
    """

    def __init__(self, version: Version, log_probs: LogProbDtype, directory: Path | None) -> None:
        self.columns = Columns()
        self.store = TrajectoryStore(log_probs, directory)
        self.masses = StaticMasses(self.columns, version)
        self._version = version

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self.store.nbytes + ROW_BYTES * len(self)

    @property
    def allocated(self) -> int:
        """Bytes that are held, used or not."""
        return self.store.allocated + self.columns.allocated + self.masses.sums.allocated

    def add(self, ids: Integers, staged: Staged, groups: Integers, base: Floats, now: float, evicted: Integers) -> None:
        """Stores trajectories at age 0 in place of the rows ``evicted``."""
        self._version.value += 1
        rows = self.columns.append(ids, self.store.add(staged), groups, base, now)
        self.store.remove(self.columns.handles[evicted])
        self.columns.remove(evicted)
        if self.columns.compact():
            self.masses.all_changed(self.masses.scale)
        else:
            self.masses.rows_changed(np.concatenate([evicted, rows]))

    def write_base(self, rows: Integers, base: Floats) -> None:
        """Replaces base priorities; of a row named twice the last value stays."""
        self._version.value += 1
        self.columns.log_base[rows] = log_of(base)
        self.masses.rows_changed(rows)

    def write_fresh(self, rows: Integers, log_fresh: Floats, since: float) -> None:
        """Replaces freshness by what was measured when the clock stood at ``since``; of a row named twice the last."""
        self._version.value += 1
        self.columns.log_fresh[rows], self.columns.since[rows] = log_fresh, since
        self.masses.rows_changed(rows)

    def evictions(
        self, staged: Staged, eviction: Eviction, now: float, bounds: Bounds, masses: Callable[[], Floats]
    ) -> Integers:
        """Rows that have to go for ``staged`` to come in; nothing changes.

        Raises:
            NoRoom: Too many are pinned.
        """
        expired = eviction.expired(self.columns, now)
        more = len(self) + len(staged.blocks) - len(expired) - bounds.capacity
        size = 0 if bounds.max_bytes is None else self.nbytes + self.growth(staged) - bounds.max_bytes
        pieces = eviction.order(self.columns, masses)
        if size <= 0:
            return np.concatenate([expired, *self._first(more, expired, pieces)])
        return self._until_small_enough(staged, expired, pieces, more, size)

    def growth(self, staged: Staged) -> int:
        """Bytes by which the content would grow."""
        return self.store.growth(staged) + ROW_BYTES * len(staged.blocks)

    def _first(self, count: int, expired: Integers, pieces: Iterator[Integers]) -> Iterator[Integers]:
        while count > 0:
            piece = next(pieces, None)
            if piece is None:
                raise NoRoom(f"room for {count} more trajectories is needed, but all that is left is pinned")
            piece = piece[~np.isin(piece, expired)][:count]
            count -= len(piece)
            yield piece

    def _until_small_enough(
        self, staged: Staged, expired: Integers, pieces: Iterator[Integers], more: int, size: int
    ) -> Integers:
        shrinkage, chosen, gone = self.store.shrinkage(staged), expired.tolist(), set(expired.tolist())
        size -= sum(shrinkage(handle) + ROW_BYTES for handle in self.columns.handles[expired].tolist())
        for row in (row for piece in pieces for row in piece.tolist() if row not in gone):
            if more <= 0 and size <= 0:
                break
            chosen.append(row)
            more, size = more - 1, size - shrinkage(int(self.columns.handles[row])) - ROW_BYTES
        if more > 0 or size > 0:
            missing = f"{max(more, 0)} more trajectories and {max(size, 0)} more bytes"
            raise NoRoom(f"room for {missing} is needed, but all that is left is pinned")
        return np.array(chosen, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as contiguous tensors and primitives that share no memory with what is stored."""
        columns = {name: torch.from_numpy(column) for name, column in self.columns.packed().items()}
        trajectories = self.store.packed(self.columns.handles[self.columns.live_rows()])
        scale = self.masses.scale
        return {
            "checksum": checksum(columns, trajectories),
            "columns": columns,
            "end": self.columns.end,
            "scale": [scale.reference, scale.high, scale.low],
            "trajectories": trajectories,
        }

    def load_state_dict(self, state: dict[str, Any], alpha: float, decay: Decay) -> None:
        """Fills empty content with what :meth:`state_dict` returned.

        Raises:
            KeyError: A part is missing.
            ValueError: The parts do not fit together.
        """
        self._version.value += 1
        packed: dict[str, NDArray[np.generic]] = {name: column.numpy() for name, column in state["columns"].items()}
        handles = self.store.load(state["trajectories"])
        self.columns.load(packed, handles, state["end"])
        self.masses.adjust(alpha, decay)
        self.masses.all_changed(Scale(*state["scale"]))
