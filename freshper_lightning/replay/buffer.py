"""Prioritized replay of trajectories whose worth falls with their age."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from freshper_lightning.replay.clock import CLOCKS, ClockName, clock_value
from freshper_lightning.replay.columns import Columns, Floats, Integers
from freshper_lightning.replay.decay import Decay
from freshper_lightning.replay.index import Snapshot, SnapshotKey, importance_weights
from freshper_lightning.replay.priority import Priority
from freshper_lightning.replay.refresher import Refresher
from freshper_lightning.replay.storage import TrajectoryStore, nbytes_of, pack, unpack
from freshper_lightning.trajectory import ClockReading, Trajectory

DrawName = Literal["stratified"]
EvictionName = Literal["fifo"]
FORMAT_VERSION = 1
_COLUMNS = ("ids", "log_base", "log_fresh", "since")


class NothingToDraw(RuntimeError):  # noqa: N818 - a state of the buffer, which the caller answers by skipping an update
    """The buffer is empty, or every priority in it is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One draw of ``n`` trajectories, with replacement; all fields describe the same moment.

    ``weights`` multiply the loss of a trajectory and undo, as far as ``beta`` says, that it was drawn by priority.
    """

    ids: Integers
    """int64 [n], increasing; an id may come up several times."""
    trajectories: tuple[Trajectory, ...]
    """The trajectory of each id."""
    probabilities: Floats
    """float64 [n]: share of the total mass of each drawn entry, above 0."""
    weights: Floats
    """float64 [n]: ``(N P)**-beta`` over its maximum in this draw."""
    ages: Floats
    """float64 [n]: age in units of the clock, since collection or the last measurement of freshness."""


class ReplayBuffer:
    """Every draw has probabilities ``p**alpha / sum p**alpha`` exactly, ``p = base x freshness`` at that moment.

    ``log p = log base + log fresh + log decay(now - since)``. A new entry has its own priority at once; there is no
    floor and no historic maximum, so a base of 0 means probability 0. A probability above 1e-290 is exact to a relative
    1e-12, one below is 0. Draws are a function of content, clock, parameters, seed and the number of draws so far:
    neither global random state nor the decay thread has a say in them.

    Not for concurrent use: one thread owns the buffer; the decay thread sees immutable values only. Should it fail, the
    next call that uses the buffer raises RuntimeError with the thread's exception, and its traceback, as the cause.

    Source: Schaul et al. 2016 (1511.05952), equation 1, section 3.4 and appendix B.2.1; freshness from Ma et al. 2026
    (2604.16918).

    Args:
        capacity: Greatest number of trajectories.
        priority: Base priority at collection.
        decay: Freshness as a function of age.
        clock: Unit of age.
        alpha: How far priorities matter, in [0, 1]; 0 draws evenly from all entries whose priority is above 0.
        seed: Seed of all draws, at least 0.
        max_bytes: Greatest value of ``nbytes``.
        draw: How a batch is drawn.
        eviction: What has to go when the buffer is full: the oldest first.
        asynchronous: Whether :meth:`prefetch` evaluates priorities in a thread.

    Raises:
        ValueError: A parameter is out of range.
    """

    def __init__(
        self,
        capacity: int,
        priority: Priority,
        decay: Decay,
        clock: ClockName = "updates",
        alpha: float = 0.6,
        seed: int = 0,
        max_bytes: int | None = None,
        draw: DrawName = "stratified",
        eviction: EvictionName = "fifo",
        asynchronous: bool = True,
    ) -> None:
        _require(capacity >= 1, "capacity", capacity, "at least 1")
        _require(0 <= alpha <= 1, "alpha", alpha, "in [0, 1]")
        _require(seed >= 0, "seed", seed, "at least 0")
        _require(max_bytes is None or max_bytes >= 1, "max_bytes", max_bytes, "at least 1, or none for no limit")
        _require(clock in CLOCKS, "clock", clock, f"one of {', '.join(CLOCKS)}")
        _require(draw in get_args(DrawName), "draw", draw, f"one of {', '.join(get_args(DrawName))}")
        _require(
            eviction in get_args(EvictionName), "eviction", eviction, f"one of {', '.join(get_args(EvictionName))}"
        )
        self.capacity = capacity
        self.priority = priority
        self.decay = decay
        self.clock = clock
        self.alpha = alpha
        self.seed = seed
        self.max_bytes = max_bytes
        self.asynchronous = asynchronous
        self._columns = Columns.empty()
        self._store = TrajectoryStore()
        self._next_id = 0
        self._draws = 0
        self._refresher: Refresher | None = None
        self._snapshot: Snapshot | None = None

    def __len__(self) -> int:
        return len(self._store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all trajectories (see :func:`freshper_lightning.replay.storage.nbytes_of`) and their priorities."""
        return self._store.nbytes + self._columns.nbytes

    def draws(self) -> int:
        """Number of draws so far, over all runs that this state has been through."""
        return self._draws

    def ids(self) -> Integers:
        """int64 [N]: ids of what is stored, increasing, oldest first."""
        return self._columns.ids.copy()

    def get(self, ids: ArrayLike) -> tuple[Trajectory, ...]:
        """Trajectories in the order of ``ids`` [n].

        Raises:
            KeyError: An id was evicted or never given; the message names it.
        """
        return self._store.get(np.asarray(ids, np.int64).tolist())

    def add(self, trajectories: Sequence[Trajectory], now: ClockReading) -> Integers:
        """Stores trajectories at age 0 and evicts the oldest ones while there are too many; all or nothing.

        Returns:
            int64 [n]: their ids, in order; an id is never given twice.

        Raises:
            ValueError: They alone exceed the capacity or the byte budget, lack what the priority needs, or do not keep
                the types of :class:`~freshper_lightning.trajectory.Trajectory`; or the clock ran backwards.
        """
        self._raise_thread_failure()
        since = self._clock_value(now)
        trajectories = tuple(trajectories)
        base = np.array([self._base_of(trajectory) for trajectory in trajectories], np.float64)
        copies = unpack(pack(trajectories))
        self._require_room(copies)
        ids = np.arange(self._next_id, self._next_id + len(copies), dtype=np.int64)
        if len(copies):
            self._store.add(ids.tolist(), copies)
            self._columns = self._columns.followed_by(ids, base, since)
            self._next_id += len(copies)
            self._evict_oldest(self._excess())
        return ids

    def sample(self, n: int, now: ClockReading, beta: float) -> Draw:
        """Draws ``n`` trajectories, stratified and with replacement, at the priorities of this very moment.

        Raises:
            NothingToDraw: Nothing has a priority above 0; the draw does not count.
            ValueError: ``n`` is below 1, ``beta`` outside [0, 1], or the clock ran backwards.
        """
        _require(n >= 1, "n", n, "at least 1")
        _require(0 <= beta <= 1, "beta", beta, "in [0, 1]")
        snapshot = self._snapshot_at(now)
        if not snapshot.total > 0:
            raise NothingToDraw(f"none of {len(self)} trajectories in the replay buffer has a priority above 0")
        rows = snapshot.draw(self._uniforms(n))
        self._draws += 1
        probabilities = snapshot.probabilities_of(rows)
        return Draw(
            ids=self._columns.ids[rows],
            trajectories=self._store.get(self._columns.ids[rows].tolist()),
            probabilities=probabilities,
            weights=importance_weights(probabilities, beta),
            ages=snapshot.key.now - self._columns.since[rows],
        )

    def _uniforms(self, n: int) -> Floats:
        """float64 [n] in [0, 1), a function of seed and number of the draw alone."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, self._draws)))).random(n)

    def has_mass(self, now: ClockReading) -> bool:
        """Whether :meth:`sample` would find something to draw at this moment, when it reuses the work done here."""
        return self._snapshot_at(now).total > 0

    def probabilities(self, now: ClockReading) -> Floats:
        """float64 [N]: probability of each entry, in the order of :meth:`ids`; all 0 where there is nothing to draw."""
        return self._snapshot_at(now).probabilities()

    def ages(self, now: ClockReading) -> Floats:
        """float64 [N]: age of each entry in units of the clock, in the order of :meth:`ids`."""
        return self._clock_value(now) - self._columns.since

    def update_priorities(self, ids: ArrayLike, values: ArrayLike) -> int:
        """Replaces base priorities; of an id given twice the last value stays, and ages go on.

        Args:
            ids: int64 [n]; an evicted one is passed over.
            values: float64 [n], finite and at least 0; 0 makes an entry impossible to draw.

        Returns:
            How many of ``ids`` were passed over.

        Raises:
            ValueError: A value is out of range, or the lengths differ; nothing is changed.
        """
        self._raise_thread_failure()
        base = np.asarray(values, np.float64)
        wrong = base[~(np.isfinite(base) & (base >= 0))]
        _require(len(wrong) == 0, "priority", wrong[:1].tolist(), "finite and at least 0")
        rows, stored = self._rows_of(ids, base)
        self._columns = self._columns.with_base(rows, base[stored])
        return int((~stored).sum())

    def observe(self, ids: ArrayLike, log_fresh: ArrayLike, now: ClockReading) -> int:
        """Replaces freshness by what was measured now, and restarts the age, so that staleness is not counted twice.

        Args:
            ids: int64 [n]; an evicted one is passed over; of one given twice the last value stays.
            log_fresh: float64 [n], at most 0; ``-inf`` takes an entry out of all draws.
            now: When it was measured.

        Returns:
            How many of ``ids`` were passed over.

        Raises:
            ValueError: A value is above 0 or NaN, the lengths differ, or the clock ran backwards; nothing is changed.
        """
        self._raise_thread_failure()
        values = np.asarray(log_fresh, np.float64)
        wrong = values[~(values <= 0)]
        _require(len(wrong) == 0, "log_fresh", wrong[:1].tolist(), "at most 0")
        since = self._clock_value(now)
        rows, stored = self._rows_of(ids, values)
        self._columns = self._columns.with_fresh(rows, values[stored], since)
        return int((~stored).sum())

    def prefetch(self, now: ClockReading) -> None:
        """Asks the decay thread for the priorities of ``now`` and returns at once; changes the speed of draws only.

        Raises:
            ValueError: The clock ran backwards.
        """
        self._raise_thread_failure()
        key = self._key_at(now)
        if self.asynchronous:
            self._refresher = self._refresher or Refresher()
            self._refresher.request(key)

    def close(self) -> None:
        """Ends the decay thread; the buffer stays usable, and a later :meth:`prefetch` starts a new thread.

        Raises:
            RuntimeError: The thread has failed, and no call has said so yet.
        """
        refresher, self._refresher = self._refresher, None
        if refresher is not None:
            refresher.close()

    def state_dict(self) -> dict[str, Any]:
        """Content, ids and the position of the random stream, as contiguous tensors and primitives.

        Parameters belong to the configuration and are not part of the state; the names of clock and priority are, since
        stored ages and base priorities mean nothing without them.
        """
        columns = {name: torch.from_numpy(getattr(self._columns, name).copy()) for name in _COLUMNS}
        return {
            "format_version": FORMAT_VERSION,
            "clock": self.clock,
            "priority": repr(self.priority),
            "next_id": self._next_id,
            "draws": self._draws,
            "columns": columns,
            "trajectories": self._store.packed(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces all content by that of ``state``, bit for bit; all or nothing.

        With the seed and the parameters of the run that saved it, sampling goes on as if that run had not ended.

        Raises:
            KeyError: A part of the state is missing.
            ValueError: The state has another format, was made with another clock or priority, or does not fit in here.
        """
        for key, value in (
            ("format_version", FORMAT_VERSION),
            ("clock", self.clock),
            ("priority", repr(self.priority)),
        ):
            _require(state[key] == value, f"{key} of the saved replay buffer", state[key], repr(value))
        columns = Columns(*(state["columns"][name].numpy().copy() for name in _COLUMNS))
        trajectories = unpack(state["trajectories"])
        self._require_room(trajectories)
        store = TrajectoryStore()
        store.add(columns.ids.tolist(), trajectories)
        self._columns, self._store = columns, store
        self._next_id, self._draws = state["next_id"], state["draws"]

    def _raise_thread_failure(self) -> None:
        if self._refresher is not None:
            self._refresher.raise_failure()

    def _base_of(self, trajectory: Trajectory) -> float:
        base = self.priority.base(trajectory)
        name = f"{self.priority} of member {trajectory.member} of group {trajectory.group}"
        _require(math.isfinite(base) and base >= 0, name, base, "finite and at least 0")
        return base

    def _clock_value(self, now: ClockReading) -> float:
        value = float(clock_value(now, self.clock))
        newest = self._columns.newest()
        _require(value >= newest, f"now ({self.clock})", value, f"at least {newest}, when the newest entry came in")
        return value

    def _key_at(self, now: ClockReading) -> SnapshotKey:
        return SnapshotKey(self._columns, self._clock_value(now), self.alpha, self.decay)

    def _snapshot_at(self, now: ClockReading) -> Snapshot:
        """The prefetched snapshot if it is exactly the one asked for, or else the same one, built here."""
        self._raise_thread_failure()
        key = self._key_at(now)
        prefetched = self._refresher.published if self._refresher is not None else None
        for snapshot in (self._snapshot, prefetched):
            if snapshot is not None and snapshot.key.matches(key):
                return snapshot
        self._snapshot = Snapshot.build(key)
        return self._snapshot

    def _rows_of(self, ids: ArrayLike, values: Floats) -> tuple[Integers, NDArray[np.bool_]]:
        wanted = np.asarray(ids, np.int64)
        if wanted.shape != values.shape or wanted.ndim != 1:
            raise ValueError(f"ids and values must be two sequences of one length, not {wanted.shape}, {values.shape}")
        rows, stored = self._columns.rows_of(wanted)
        return rows[stored], stored

    def _require_room(self, trajectories: Sequence[Trajectory]) -> None:
        count = len(trajectories)
        _require(count <= self.capacity, "number of trajectories", count, f"at most the capacity, {self.capacity}")
        if self.max_bytes is not None:
            size = sum(map(nbytes_of, trajectories)) + self._columns.row_nbytes * count
            _require(size <= self.max_bytes, "bytes of trajectories", size, f"at most max_bytes, {self.max_bytes}")

    def _excess(self) -> int:
        """How many of the oldest entries have to go."""
        excess, size, sizes = 0, self.nbytes, self._store.sizes()
        while len(self) - excess > self.capacity or (self.max_bytes is not None and size > self.max_bytes):
            size -= next(sizes) + self._columns.row_nbytes
            excess += 1
        return excess

    def _evict_oldest(self, count: int) -> None:
        self._store.remove(self._columns.ids[:count].tolist())
        self._columns = self._columns.without_oldest(count)


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
