"""The buffer against a model of it that is too simple to be wrong: one list, 50 digits, no state kept in the clock."""

import io
import math

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freshper_lightning.replay import AbsoluteReward, ExponentialDecay, NoDecay, ReplayBuffer
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import assert_same, make_trajectory
from tests.replay.test_index import assert_exact, exact_probabilities

CAPACITY = 6
rewards = st.just(0.0) | st.floats(-10, 10, width=32)
priorities = st.just(0.0) | st.floats(1e-300, 1e300) | st.floats(0, 5)


class BufferAgainstModel(RuleBasedStateMachine):
    """``entries`` maps an id to [base, log fresh, since, trajectory], oldest first."""

    @initialize(alpha=st.sampled_from([0.3, 0.6, 1.0]), tau=st.sampled_from([None, 0.5, 50.0]), threaded=st.booleans())
    def start(self, alpha, tau, threaded):
        self.alpha, self.tau, self.threaded = alpha, tau, threaded
        self.now, self.entries, self.next_id, self.draws = 0, {}, 0, 0
        self.buffer = self.new_buffer()

    def new_buffer(self):
        decay = NoDecay() if self.tau is None else ExponentialDecay(self.tau)
        priority = AbsoluteReward(eps=0.0)
        return ReplayBuffer(CAPACITY, priority, decay, alpha=self.alpha, seed=3, asynchronous=self.threaded)

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()

    @property
    def reading(self):
        return ClockReading(updates=self.now)

    def model_probabilities(self):
        columns = [(base, fresh, since) for base, fresh, since, _ in self.entries.values()]
        return exact_probabilities(columns, self.now, self.alpha, self.tau) if columns else []

    @rule(values=st.lists(rewards, max_size=CAPACITY))
    def add(self, values):
        items = [make_trajectory(rewards=(value,)) for value in values]
        for item in items:
            self.entries[self.next_id] = [abs(item.episode_return), 0.0, self.now, item]
            self.next_id += 1
        self.buffer.add(items, self.reading)
        while len(self.entries) > CAPACITY:
            del self.entries[min(self.entries)]

    @rule(changes=st.lists(st.tuples(st.integers(0, 20), priorities), max_size=5))
    def update(self, changes):
        known = [key for key, _ in changes if key in self.entries]
        for key, value in changes:
            if key in self.entries:
                self.entries[key][0] = value
        ids, values = [key for key, _ in changes], [value for _, value in changes]
        assert self.buffer.update_priorities(ids, values) == len(changes) - len(known)

    @rule(changes=st.dictionaries(st.integers(0, 20), st.floats(-20, 0), max_size=5))
    def observe(self, changes):
        for key, value in changes.items():
            if key in self.entries:
                self.entries[key][1:3] = value, self.now
        self.buffer.observe(list(changes), list(changes.values()), self.reading)

    @rule(step=st.integers(0, 3) | st.integers(0, 10**9))
    def advance(self, step):
        self.now += step

    @rule()
    def prefetch(self):
        self.buffer.prefetch(self.reading)

    @rule()
    def save_and_load(self):
        file = io.BytesIO()
        torch.save(self.buffer.state_dict(), file)
        file.seek(0)
        self.buffer.close()
        self.buffer = self.new_buffer()
        self.buffer.load_state_dict(torch.load(file, weights_only=True))

    @precondition(lambda self: self.buffer.has_mass(self.reading))
    @rule(n=st.integers(1, 9), beta=st.floats(0, 1))
    def sample(self, n, beta):
        model = dict(zip(self.entries, self.model_probabilities(), strict=True))
        draw = self.buffer.sample(n, self.reading, beta)
        self.draws += 1
        expected = [model[key] for key in draw.ids.tolist()]
        assert_exact(draw.probabilities, expected)
        rarest = min(expected)
        weights = [math.exp(-beta * (float(share.ln()) - float(rarest.ln()))) for share in expected]
        np.testing.assert_allclose(draw.weights, weights, rtol=1e-10)
        assert draw.ages.tolist() == [float(self.now - self.entries[key][2]) for key in draw.ids.tolist()]
        counts = {key: draw.ids.tolist().count(key) for key in model}
        assert all(abs(counts[key] - n * float(share)) < 2 for key, share in model.items())
        for key, trajectory in zip(draw.ids.tolist(), draw.trajectories, strict=True):
            assert_same(trajectory, self.entries[key][3])

    @invariant()
    def content_and_probabilities_agree(self):
        assert self.buffer.ids().tolist() == list(self.entries)
        assert self.buffer.draws() == self.draws
        assert_exact(self.buffer.probabilities(self.reading), self.model_probabilities())


BufferAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_the_buffer_agrees_with_the_model = BufferAgainstModel.TestCase
