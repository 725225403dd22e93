"""Trajectories by id: what a replay buffer is before anything is drawn from it."""

import numpy as np
from numpy.typing import ArrayLike

from freshper_lightning.replay.columns import Floats, Integers
from freshper_lightning.replay.content import Content
from freshper_lightning.replay.locking import Turns, exclusive
from freshper_lightning.trajectory import Trajectory


class StoredTrajectories:
    """Ids are increasing and never reused, and stay with their trajectories until these are evicted."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._lock = Turns()

    @exclusive
    def __len__(self) -> int:
        return len(self._content)

    @property
    @exclusive
    def nbytes(self) -> int:
        """Bytes of all trajectories, their images and their rows: what ``max_bytes`` bounds."""
        return self._content.nbytes

    @property
    @exclusive
    def image_nbytes(self) -> int:
        """The part of ``nbytes`` that is images."""
        return self._content.store.image_nbytes

    @property
    @exclusive
    def allocated(self) -> int:
        """Bytes of memory, or of mapped files, that are held: ``nbytes``, and the room that is not used."""
        return self._content.allocated

    @exclusive
    def ids(self) -> Integers:
        """int64 [N]: ids of what is stored, increasing, oldest first."""
        columns = self._content.columns
        return columns.ids[columns.live_rows()]

    @exclusive
    def get(self, ids: ArrayLike) -> tuple[Trajectory, ...]:
        """Trajectories in the order of ``ids`` [n].

        Raises:
            KeyError: An id was evicted or never given; the message names it.
        """
        columns = self._content.columns
        return self._content.store.get(columns.handles[columns.known_rows(ids)])

    @exclusive
    def bases(self, ids: ArrayLike) -> Floats:
        """float64 [n]: base priorities in the order of ``ids`` [n], exact to a relative 1e-13 or so.

        Raises:
            KeyError: An id was evicted or never given; the message names it.
        """
        columns = self._content.columns
        found: Floats = np.exp(columns.log_base[columns.known_rows(ids)])
        return found

    @exclusive
    def freshness(self, ids: ArrayLike) -> Floats:
        """float64 [n]: measured freshness in the order of ``ids`` [n], 1 for what was never measured.

        Raises:
            KeyError: An id was evicted or never given; the message names it.
        """
        columns = self._content.columns
        found: Floats = np.exp(columns.log_fresh[columns.known_rows(ids)])
        return found

    @exclusive
    def times_drawn(self, ids: ArrayLike) -> Integers:
        """int64 [n]: how many times each of ``ids`` [n] was drawn, repetitions in one draw included.

        Raises:
            KeyError: An id was evicted or never given; the message names it.
        """
        columns = self._content.columns
        return columns.draws[columns.known_rows(ids)]

    @exclusive
    def pin(self, ids: ArrayLike) -> None:
        """Keeps trajectories from eviction until :meth:`unpin`; pinning twice is pinning once.

        Raises:
            KeyError: An id was evicted or never given; the message names it, and nothing is pinned.
        """
        self._content.columns.pinned[self._content.columns.known_rows(ids)] = True

    @exclusive
    def unpin(self, ids: ArrayLike | None = None) -> None:
        """Lets trajectories be evicted again: ``ids`` [n], or all.

        Raises:
            KeyError: An id was evicted or never given; the message names it, and nothing is unpinned.
        """
        rows = self._content.columns.live_rows() if ids is None else self._content.columns.known_rows(ids)
        self._content.columns.pinned[rows] = False

    @exclusive
    def pinned(self) -> Integers:
        """int64: ids of what is pinned, increasing."""
        columns = self._content.columns
        rows = columns.live_rows()
        return columns.ids[rows[columns.pinned[rows]]]
