"""The buffer against a model of it that is too simple to be wrong: one list, 50 digits, no state kept in the clock."""

import io
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freshper_lightning.replay import (
    AbsoluteReward,
    ExponentialDecay,
    HardAge,
    InverseDecay,
    NoDecay,
    ReplayBuffer,
    WindowDecay,
    columns,
)
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import assert_same, make_trajectory
from tests.replay.model import (
    assert_exact,
    exact_probabilities,
    exact_weights,
    exponential,
    inverse,
    no_decay,
    window,
)

CAPACITY = 6
MAX_AGE = 40
rewards = st.just(0.0) | st.floats(-10, 10, width=32)
priorities = st.just(0.0) | st.floats(1e-300, 1e300) | st.floats(0, 5)
decays = st.sampled_from(
    [
        (NoDecay(), no_decay),
        (ExponentialDecay(0.5), exponential(0.5)),
        (ExponentialDecay(50), exponential(50)),
        (InverseDecay(), inverse),
        (WindowDecay(30), window(30)),
    ]
)
evictions = st.sampled_from(["fifo", "lowest", HardAge(MAX_AGE)])


class Entry:
    def __init__(self, base, now, trajectory):
        self.base, self.log_fresh, self.since, self.added = base, 0.0, now, now
        self.trajectory, self.pinned, self.draws = trajectory, False, 0


MANY = 4
pool = ThreadPoolExecutor(MANY)


class BufferAgainstModel(RuleBasedStateMachine):
    """``entries`` maps an id to what the buffer should know of it, oldest first.

    With ``many`` threads whatever reads or draws does so in all of them at once.
    """

    @initialize(
        alpha=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
        decay=decays,
        eviction=evictions,
        threaded=st.booleans(),
        many=st.booleans(),
        most_dead=st.sampled_from([2, 50]),
    )
    def start(self, alpha, decay, eviction, threaded, many, most_dead):
        self.patch, self.many, self.interval = pytest.MonkeyPatch(), many, sys.getswitchinterval()
        sys.setswitchinterval(1e-5 if many else self.interval)
        self.patch.setattr(columns, "_MOST_DEAD", most_dead)  # rows move often, or have holes between them for long
        self.alpha, self.decay, self.eviction, self.threaded = alpha, decay, eviction, threaded
        self.now, self.entries, self.next_id, self.draws = 0, {}, 0, 0
        self.buffer = self.new_buffer()

    def new_buffer(self):
        return ReplayBuffer(
            CAPACITY,
            AbsoluteReward(eps=0.0),
            self.decay[0],
            alpha=self.alpha,
            seed=3,
            asynchronous=self.threaded,
            eviction=self.eviction,
        )

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()
            self.patch.undo()
            sys.setswitchinterval(self.interval)

    def in_threads(self, call):
        """What the call returns, in each thread."""
        if not self.many:
            return [call()]
        return [future.result() for future in [pool.submit(call) for _ in range(MANY)]]

    @property
    def reading(self):
        return ClockReading(updates=self.now)

    def model_probabilities(self):
        rows = [(entry.base, entry.log_fresh, entry.since) for entry in self.entries.values()]
        return exact_probabilities(rows, self.now, self.alpha, self.decay[1])

    def model_eviction(self, count):
        """Ids that have to go for ``count`` new ones, or None where there is no room."""
        free = [key for key, entry in self.entries.items() if not entry.pinned]
        expired = [key for key in free if self.now - self.entries[key].added > MAX_AGE]
        gone = expired if isinstance(self.eviction, HardAge) else []
        if self.eviction == "lowest":
            order = dict(zip(self.entries, self.buffer.probabilities(self.reading).tolist(), strict=True))
            free.sort(key=order.__getitem__)
        rest = [key for key in free if key not in gone]
        more = max(0, len(self.entries) - len(gone) + count - CAPACITY)
        return None if more > len(rest) else gone + rest[:more]

    @rule(values=st.lists(rewards, max_size=CAPACITY), pin=st.booleans())
    def add(self, values, pin):
        items = [make_trajectory(rewards=(value,)) for value in values]
        gone = self.model_eviction(len(items))
        if gone is None:
            with pytest.raises(ValueError, match="pinned"):
                self.buffer.add(items, self.reading, pin=pin)
            return
        self.buffer.add(items, self.reading, pin=pin)
        for key in gone:
            del self.entries[key]
        for item in items:
            self.entries[self.next_id] = Entry(abs(item.episode_return), self.now, item)
            self.entries[self.next_id].pinned = pin
            self.next_id += 1

    @rule(ids=st.sets(st.integers(0, 40), max_size=4), to=st.booleans())
    def pin_or_unpin(self, ids, to):
        known = [key for key in sorted(ids) if key in self.entries]
        (self.buffer.pin if to else self.buffer.unpin)(known)
        for key in known:
            self.entries[key].pinned = to

    @rule(changes=st.lists(st.tuples(st.integers(0, 40), priorities), max_size=5))
    def update(self, changes):
        known = [key for key, _ in changes if key in self.entries]
        for key, value in changes:
            if key in self.entries:
                self.entries[key].base = value
        ids, values = [key for key, _ in changes], [value for _, value in changes]
        assert self.buffer.update_priorities(ids, values) == len(changes) - len(known)

    @rule(changes=st.dictionaries(st.integers(0, 40), st.floats(-20, 0) | st.floats(-1e9, 0), max_size=5))
    def observe(self, changes):
        for key, value in changes.items():
            if key in self.entries:
                self.entries[key].log_fresh, self.entries[key].since = value, self.now
        self.buffer.observe(list(changes), list(changes.values()), self.reading)

    @rule(step=st.integers(0, 3) | st.integers(0, 10**9))
    def advance(self, step):
        self.now += step

    @precondition(lambda self: isinstance(self.decay[0], ExponentialDecay))
    @rule(tau=st.floats(0.1, 1e6))
    def change_tau(self, tau):
        self.decay = ExponentialDecay(tau), exponential(tau)
        self.buffer.decay = self.decay[0]

    @rule()
    def prefetch(self):
        self.in_threads(lambda: self.buffer.prefetch(self.reading))

    @rule()
    def save_and_load(self):
        file = io.BytesIO()
        before = self.buffer.probabilities(self.reading).tobytes()
        torch.save(self.buffer.state_dict(), file)
        file.seek(0)
        self.buffer.close()
        self.buffer = self.new_buffer()
        self.buffer.load_state_dict(torch.load(file, weights_only=True))
        assert self.buffer.probabilities(self.reading).tobytes() == before

    @precondition(lambda self: self.buffer.probabilities(self.reading).any())
    @rule(n=st.integers(1, 9) | st.integers(10, 100), beta=st.floats(0, 1))
    def sample(self, n, beta):
        model = dict(zip(self.entries, self.model_probabilities(), strict=True))
        draws = self.in_threads(lambda: self.buffer.sample(n, self.reading, beta))
        self.draws += len(draws)
        for draw in draws:
            self.check_draw(draw, n, beta, model)

    def check_draw(self, draw, n, beta, model):
        expected = [model[key] for key in draw.ids.tolist()]
        assert all(share > 0 for share in expected)
        assert_exact(draw.probabilities, expected)
        assert_exact(draw.weights, exact_weights(expected, beta))
        assert draw.ages.tolist() == [float(self.now - self.entries[key].since) for key in draw.ids.tolist()]
        counts = {key: draw.ids.tolist().count(key) for key in model}
        assert all(abs(counts[key] - n * float(share)) < 2 for key, share in model.items())
        for key, trajectory in zip(draw.ids.tolist(), draw.trajectories, strict=True):
            self.entries[key].draws += 1
            assert_same(trajectory, self.entries[key].trajectory)

    @invariant()
    def content_and_probabilities_agree(self):
        assert self.buffer.ids().tolist() == list(self.entries)
        assert self.buffer.draws() == self.draws
        assert self.buffer.pinned().tolist() == [key for key, entry in self.entries.items() if entry.pinned]
        expected = self.model_probabilities()
        for probabilities in self.in_threads(lambda: self.buffer.probabilities(self.reading)):
            assert_exact(probabilities, expected)

    @invariant()
    def each_id_is_found_by_itself_here_and_in_a_copy(self):
        for buffer in (self.buffer, deepcopy(self.buffer)):
            for key, entry in self.entries.items():
                assert buffer.times_drawn([key]).tolist() == [entry.draws]
                assert buffer.freshness([key]) == pytest.approx(math.exp(entry.log_fresh), rel=1e-15)
                assert buffer.get([key])[0].rewards.tolist() == entry.trajectory.rewards.tolist()


BufferAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_the_buffer_agrees_with_the_model = BufferAgainstModel.TestCase
