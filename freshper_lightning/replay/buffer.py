"""Prioritized replay of trajectories whose worth falls with their age."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from freshper_lightning.replay.clock import ClockName, clock_value
from freshper_lightning.replay.codec import LogProbDtype
from freshper_lightning.replay.columns import Floats, Integers
from freshper_lightning.replay.content import ROW_BYTES, Bounds, Content
from freshper_lightning.replay.decay import Decay
from freshper_lightning.replay.draw import Draw, HandedOut
from freshper_lightning.replay.evaluator import Evaluator
from freshper_lightning.replay.eviction import Eviction, EvictionName
from freshper_lightning.replay.locking import exclusive
from freshper_lightning.replay.masses import Masses, Scale, Version
from freshper_lightning.replay.parameters import Parameters, Parametrised
from freshper_lightning.replay.priority import Priority, RatePriority, bases_of
from freshper_lightning.replay.requirements import measured, numbers_of, require, require_whole_number
from freshper_lightning.replay.schemes import DrawName, DrawScheme, NothingToDraw, Picked
from freshper_lightning.replay.stored import StoredTrajectories
from freshper_lightning.replay.streams import DrawStreams
from freshper_lightning.replay.success import SuccessRates
from freshper_lightning.replay.weights import Gather, Weighting, WeightsOver
from freshper_lightning.replay.wholeness import FORMAT_VERSION, require_whole
from freshper_lightning.trajectory import ClockReading, Trajectory


class ReplayBuffer(Parametrised, StoredTrajectories):
    """Every draw has probabilities ``p**alpha / sum p**alpha`` exactly, ``p = base x freshness`` at that moment.

    ``log p = log base + log fresh + log decay(now - since)``. A new entry has its own priority at once; there is no
    floor and no historic maximum, so a base of 0 means probability 0. A probability above 1e-290 is exact to a relative
    1e-12, one below is 0. Draws are a function of content, clock, parameters, seed and the number of draws so far:
    neither global random state nor the decay thread has a say in them.

    Threads may share a buffer: their calls take turns. The decay thread never holds anybody up: it reads what is there
    and throws its result away when that has changed. Should it fail, the next call that uses the buffer raises
    RuntimeError with the thread's exception, and its traceback, as the cause.

    Source: Schaul et al. 2016 (1511.05952), equation 1, section 3.4 and appendix B.2.1; freshness from Ma et al. 2026
    (2604.16918).

    Args:
        capacity: Greatest number of trajectories.
        priority: Base priority at collection.
        decay: Freshness as a function of age.
        clock: Unit of age.
        alpha: How far priorities matter, in [0, 1]; 0 draws evenly from all entries whose priority is above 0.
        seed: Seed of all draws, at least 0; buffers of several ranks need seeds of their own.
        max_bytes: Greatest value of ``nbytes``.
        draw: How a batch is drawn, by name or as a :class:`~freshper_lightning.replay.schemes.DrawScheme`.
        eviction: What has to go when the buffer is full, by name or as an
            :class:`~freshper_lightning.replay.eviction.Eviction`; the oldest first by default.
        asynchronous: Whether :meth:`prefetch` evaluates priorities in a thread.
        weights: What importance weights are divided by: their maximum, or their sum (so that their mean is 1).
        log_prob_dtype: How log-probabilities are stored; ``float16`` rounds them to a relative 2**-11, or an
            absolute 2**-25 near 0, and refuses those below -65504.
        memory_map: Folder for mapped files that hold the trajectories, for buffers larger than memory.

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
        draw: DrawName | DrawScheme = "stratified",
        eviction: EvictionName | Eviction = "fifo",
        asynchronous: bool = True,
        weights: WeightsOver = "max",
        log_prob_dtype: LogProbDtype = "float32",
        memory_map: str | Path | None = None,
    ) -> None:
        Parametrised.__init__(
            self,
            Parameters(
                capacity,
                priority,
                decay,
                clock,
                alpha,
                seed,
                max_bytes,
                draw,
                eviction,
                asynchronous,
                weights,
                log_prob_dtype,
                memory_map,
            ),
        )
        self._version = Version()
        StoredTrajectories.__init__(self, self._new_content())
        self._rates = SuccessRates()
        self._next_id = self._evicted = 0
        self._draws = 0
        self._streams = DrawStreams()
        self._newest = -np.inf
        self._evaluator = Evaluator()
        self._handed_out = HandedOut()

    def _new_content(self) -> Content:
        return Content(self._version, self._parameters.log_prob_dtype, self._parameters.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., "ReplayBuffer"], tuple[Any, ...]]:
        """A copy, and a buffer that was pickled, is one of its own: same parameters and content, no thread yet."""
        return _rebuilt, (type(self), vars(self._parameters), self.state_dict())

    @exclusive
    def draws(self) -> int:
        """Number of draws so far, over all runs that this state has been through."""
        return self._draws

    @exclusive
    def evicted(self) -> int:
        """Number of trajectories that had to go so far, over all runs that this state has been through."""
        return self._evicted

    @exclusive
    def add(
        self,
        trajectories: Sequence[Trajectory],
        now: ClockReading,
        priorities: ArrayLike | None = None,
        pin: bool = False,
    ) -> Integers:
        """Stores trajectories at age 0 and evicts others while there are too many; all or nothing.

        Args:
            trajectories: What to store; none of them is evicted in this call.
            now: The present moment.
            priorities: float64 [n]: base priorities that were measured, in place of those at collection.
            pin: Whether they are pinned at once.

        Returns:
            int64 [n]: their ids, in order; an id is never given twice.

        Raises:
            ValueError: They exceed the capacity or the byte budget, alone or with what is pinned; they lack what the
                priority needs, or do not keep the types of :class:`~freshper_lightning.trajectory.Trajectory`; or the
                clock ran backwards.
            OSError: The disk is too full for the mapped files.
        """
        self._evaluator.raise_failure()
        since = self._clock_value(now)
        trajectories = tuple(trajectories)
        rates = SuccessRates.counted(trajectories if isinstance(self.priority, RatePriority) else ())
        if priorities is None:
            base = bases_of(self.priority, trajectories, self._rates, rates)
        else:
            base = measured(priorities, len(trajectories))
        staged = self._content.store.stage(trajectories)
        self._require_fit(len(trajectories), staged.nbytes + ROW_BYTES * len(trajectories))
        content = self._adjusted()
        bounds = Bounds(self.capacity, self.max_bytes)
        evicted = content.evictions(staged, self.eviction, since, bounds, lambda: self._live_masses(since))
        if len(evicted):
            self._handed_out.read()
        ids = np.arange(self._next_id, self._next_id + len(trajectories), dtype=np.int64)
        if len(ids) or len(evicted):
            groups = np.array([item.group for item in trajectories], np.int64)
            content.add(ids, staged, groups, base, since, evicted)
            self._rates.merge(rates)
            self._next_id, self._evicted = self._next_id + len(ids), self._evicted + len(evicted)
            self._newest = max(self._newest, since)
        if pin:
            self.pin(ids)
        return ids

    @exclusive
    def sample(self, n: int, now: ClockReading, beta: float, gather: Gather | None = None) -> Draw:
        """Draws ``n`` trajectories at the priorities of this very moment.

        Where the data is spread over ranks, every rank calls this at once with its part of the batch, ``n``, and with
        ``gather``; the weighted parts together have the expectation of a draw from one buffer. The draw of a rank that
        holds nothing is empty then, while the others have something.

        Args:
            n: Number of trajectories.
            now: The present moment.
            beta: How far importance weights correct for priorities, in [0, 1].
            gather: Collective that returns the rows of all ranks; called exactly once.

        Raises:
            NothingToDraw: Nothing has a priority above 0, or too little for ``n`` distinct ones, on some rank; the draw
                does not count.
            ValueError: ``n`` is below 1 or does not suit the draw, ``beta`` outside [0, 1], or the clock ran backwards.
        """
        require_whole_number("n", n, 1)
        require(0 <= beta <= 1, "beta", beta, "in [0, 1]")
        masses, columns = self._masses_at(now), self._content.columns
        picked, shortage = self._pick(masses, n)
        if shortage is not None and gather is None:
            raise shortage
        weighting = Weighting(self.alpha, beta, self.decay, self.weights, gather)
        total = picked.total if picked is not None else self.scheme.total(masses, columns)
        weighed = weighting.weigh(picked, n, total, masses.scale if self.scheme.by_mass else Scale())
        if weighed is None:
            raise NothingToDraw("no rank has a priority above 0, or one has too little for its part") from shortage
        self._draws += 1
        rows = picked.rows if picked is not None else np.empty(0, np.int64)
        np.add.at(columns.draws, rows, 1)
        ages = self._clock_value(now) - columns.since[rows]
        draw = Draw(
            columns.ids[rows],
            weighed.probabilities,
            weighed.weights,
            ages,
            weighed.multiplicities,
            self.get,
            self._lock,
        )
        self._handed_out.add(draw)
        return draw

    def _pick(self, masses: Masses, n: int) -> tuple[Picked | None, NothingToDraw | None]:
        try:
            return self.scheme.pick(masses, self._content.columns, n, self._streams.of(self.seed, self._draws)), None
        except NothingToDraw as shortage:
            return None, shortage

    @exclusive
    def probabilities(self, now: ClockReading) -> Floats:
        """float64 [N]: ``p**alpha``, normalised, in the order of :meth:`ids`; all 0 where there is nothing to draw."""
        masses = self._masses_at(now)
        found = masses.of(self._content.columns.live_rows())
        return found / masses.total if masses.total > 0 else found

    @exclusive
    def ages(self, now: ClockReading) -> Floats:
        """float64 [N]: age of each entry in units of the clock, in the order of :meth:`ids`."""
        columns = self._content.columns
        return self._clock_value(now) - columns.since[columns.live_rows()]

    @exclusive
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
        self._evaluator.raise_failure()
        base = measured(values, None)
        rows, stored = self._content.columns.stored_rows(ids, len(base))
        self._adjusted().write_base(rows, base[stored])
        return len(stored) - int(np.count_nonzero(stored))

    @exclusive
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
        self._evaluator.raise_failure()
        values = numbers_of("log_fresh", log_fresh)
        wrong = values[~(values <= 0)]
        require(len(wrong) == 0, "log_fresh", wrong[:1].tolist(), "at most 0")
        since = self._clock_value(now)
        rows, stored = self._content.columns.stored_rows(ids, len(values))
        self._adjusted().write_fresh(rows, values[stored], since)
        self._newest = max(self._newest, since) if len(rows) else self._newest
        return len(stored) - int(np.count_nonzero(stored))

    @exclusive
    def prefetch(self, now: ClockReading) -> None:
        """Asks the decay thread for the priorities of ``now`` and returns at once; changes the speed of draws only.

        Under a decay that factorises there is nothing to do: priorities relative to one another do not change in time.

        Raises:
            ValueError: The clock ran backwards.
        """
        self._evaluator.raise_failure()
        value = self._clock_value(now)
        if self.asynchronous and not self.decay.factorises:
            self._evaluator.prefetch(self._adjusted().masses, value)

    @exclusive
    def close(self) -> None:
        """Ends the decay thread; the buffer stays usable, and a later :meth:`prefetch` starts a new thread.

        Raises:
            RuntimeError: The thread has failed, and no call has said so yet.
        """
        self._evaluator.close()

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Content, ids and the position of the random stream, as contiguous tensors and primitives.

        Parameters belong to the configuration and are not part of the state; the names of clock and priority are, since
        stored ages and base priorities mean nothing without them.
        """
        return {
            "format_version": FORMAT_VERSION,
            "clock": self.clock,
            "priority": repr(self.priority),
            "next_id": self._next_id,
            "evicted": self._evicted,
            "draws": self._draws,
            "rates": self._rates.state_dict(),
            **self._adjusted().state_dict(),
        }

    @exclusive
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces all content by that of ``state``, bit for bit; all or nothing.

        With the seed and the parameters of the run that saved it, sampling goes on as if that run had not ended.

        Raises:
            ValueError: The state has another format, was made with another clock or priority, is damaged, or does not
                fit in here.
        """
        require_whole(state)
        for key, value in (("clock", self.clock), ("priority", repr(self.priority))):
            require(state.get(key) == value, f"{key} of the saved replay buffer", state.get(key), repr(value))
        content = self._new_content()
        content.load_state_dict(state, self.alpha, self.decay)
        self._require_fit(len(content), content.nbytes)
        rates = SuccessRates.loaded(state["rates"])
        self._handed_out.read()
        self._content, self._rates = content, rates
        self._next_id, self._evicted, self._draws = state["next_id"], state["evicted"], state["draws"]
        self._newest = float(content.columns.since[content.columns.live_rows()].max(initial=-np.inf))

    def _clock_value(self, now: ClockReading) -> float:
        value, newest = float(clock_value(now, self.clock)), self._newest
        if value < newest:  # said by hand: a message for every call would take longer than the comparison
            allowed = f"at least {newest}, when the newest entry came in"
            raise ValueError(f"now ({self.clock}) must be {allowed}, not {value!r}")
        return value

    def _adjusted(self) -> Content:
        """The content under the parameters of this moment."""
        self._content.masses.adjust(self.alpha, self.decay)
        return self._content

    def _masses_at(self, now: ClockReading) -> Masses:
        self._evaluator.raise_failure()
        value = self._clock_value(now)
        return self._evaluator.masses(self._adjusted().masses, value)

    def _live_masses(self, now: float) -> Floats:
        content = self._adjusted()
        return self._evaluator.masses(content.masses, now).of(content.columns.live_rows())

    def _require_fit(self, count: int, size: int) -> None:
        require(count <= self.capacity, "number of trajectories", count, f"at most the capacity, {self.capacity}")
        if self.max_bytes is not None:
            require(size <= self.max_bytes, "bytes of trajectories", size, f"at most max_bytes, {self.max_bytes}")


def _rebuilt(kind: type[ReplayBuffer], parameters: dict[str, Any], state: dict[str, Any]) -> ReplayBuffer:
    buffer = kind(**parameters)
    buffer.load_state_dict(state)
    return buffer
