"""Faults that are easy to make, put in on purpose: the checks that the other tests rely on must see each of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from freshper_lightning.replay import ExponentialDecay, InverseDecay
from freshper_lightning.replay.buffer import ReplayBuffer
from freshper_lightning.replay.evaluator import Evaluator
from freshper_lightning.replay.masses import StaticMasses
from freshper_lightning.replay.tree import BlockSums
from freshper_lightning.replay.weights import Weighting
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import assert_same, make_buffer, of_rewards
from tests.replay.model import assert_exact, exact_probabilities, exponential, inverse
from tests.replay.test_buffer_model import BufferAgainstModel

REWARDS = (1.0, 2.0, 5.0, 0.5, 3.0)


def filled(decay):
    buffer = make_buffer(decay=decay, alpha=0.6)
    for step, reward in enumerate(REWARDS):
        buffer.add(of_rewards(reward), ClockReading(updates=step))
    return buffer


def check(decay, log_decay):
    """Probabilities, counts, payloads, weights and ages of draws, against the formula."""
    buffer = filled(decay)
    entries = [(reward, 0.0, step) for step, reward in enumerate(REWARDS)]
    for updates in (4, 9):
        now = ClockReading(updates=updates)
        buffer.probabilities(now)
        expected = exact_probabilities(entries, updates, 0.6, log_decay)
        shares = np.array([float(share) for share in expected])
        assert_exact(buffer.probabilities(now), expected)
        counts = np.zeros(5)
        for _ in range(40):
            draw = buffer.sample(64, now, beta=0.7)
            counts += np.bincount(draw.ids, minlength=5)
            assert (np.abs(np.bincount(draw.ids, minlength=5) - 64 * shares) < 2).all()
            assert_exact(draw.probabilities, [expected[key] for key in draw.ids.tolist()])
            weights = (shares[draw.ids] / shares[draw.ids].min()) ** -0.7
            np.testing.assert_allclose(draw.weights, weights, rtol=1e-12)
            assert draw.ages.tolist() == (updates - draw.ids).tolist()
        for key, trajectory in zip(draw.ids.tolist(), draw.trajectories, strict=True):
            assert_same(trajectory, of_rewards(REWARDS[key])[0])
        buffer.update_priorities([2], [7.0])
        entries[2] = (7.0, 0.0, 2)


DECAYS = [(ExponentialDecay(tau=3.0), exponential(3.0)), (InverseDecay(), inverse)]


@pytest.mark.parametrize(("decay", "log_decay"), DECAYS)
def test_the_check_passes_as_things_are(decay, log_decay):
    check(decay, log_decay)


def alpha_twice(patch):
    adjust = StaticMasses.adjust
    patch.setattr(StaticMasses, "adjust", lambda self, alpha, decay: adjust(self, alpha * alpha, decay))


def index_off_by_one(patch):
    find = BlockSums.find
    patch.setattr(BlockSums, "find", lambda self, shares: np.maximum(find(self, shares) - 1, 0))


def payload_off_by_one(patch):
    get = ReplayBuffer.get
    patch.setattr(ReplayBuffer, "get", lambda self, ids: get(self, np.maximum(np.asarray(ids) - 1, 0)))


def clock_one_tick_old_when_masses_are_evaluated(patch):
    masses = Evaluator.masses
    patch.setattr(Evaluator, "masses", lambda self, static, now: masses(self, static, now - 1.0))


def one_tick_before(now):
    return ClockReading(max(now.updates - 1, 0))


def clock_one_tick_old_when_entries_come_in(patch):
    add = ReplayBuffer.add
    patch.setattr(ReplayBuffer, "add", lambda self, items, now, **more: add(self, items, one_tick_before(now), **more))


def weights_of_another_snapshot(patch):
    weigh, earlier = Weighting.weigh, {}

    def stale(self, picked, *rest):
        earlier.setdefault("result", weigh(self, picked, *rest))
        fresh, old = weigh(self, picked, *rest), earlier["result"].weights
        return replace(fresh, weights=np.resize(old, len(fresh.weights)))

    patch.setattr(Weighting, "weigh", stale)


def masses_of_another_snapshot(patch):
    masses, earlier = Evaluator.masses, {}
    patch.setattr(
        Evaluator, "masses", lambda self, static, now: earlier.setdefault(id(static), masses(self, static, now))
    )


def independent_draws(patch):
    find, random = BlockSums.find, np.random.default_rng(0)
    patch.setattr(BlockSums, "find", lambda self, shares: find(self, random.random(len(shares))))


def updated_rows_are_not_evaluated(patch):
    changed = StaticMasses.rows_changed
    patch.setattr(StaticMasses, "rows_changed", lambda self, rows: changed(self, rows) if 2 not in rows else None)


MUTANTS = [
    (alpha_twice, DECAYS),
    (index_off_by_one, DECAYS),
    (payload_off_by_one, DECAYS),
    (clock_one_tick_old_when_masses_are_evaluated, DECAYS[1:]),  # a common age cancels under the other
    (clock_one_tick_old_when_entries_come_in, DECAYS),
    (weights_of_another_snapshot, DECAYS),
    (masses_of_another_snapshot, DECAYS[1:]),  # the other has one snapshot, which is kept up to date
    (independent_draws, DECAYS),
    (updated_rows_are_not_evaluated, DECAYS),
]


@pytest.mark.parametrize(("mutate", "decays"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mutant_fails_the_check(mutate, decays, monkeypatch):
    for decay, log_decay in decays:
        with monkeypatch.context() as patch:
            mutate(patch)
            with pytest.raises(AssertionError), np.errstate(all="ignore"):
                check(decay, log_decay)


QUICK = settings(
    max_examples=300,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("mutate", [mutant for mutant, _ in MUTANTS], ids=lambda mutant: mutant.__name__)
def test_each_mutant_fails_the_model(mutate, monkeypatch):
    with monkeypatch.context() as patch:
        mutate(patch)
        # A mutant may also name a row that was never written, or hand on a value that is refused.
        with (
            pytest.raises((AssertionError, Flaky, LookupError, ArithmeticError, ValueError)),
            np.errstate(all="ignore"),
        ):
            run_state_machine_as_test(BufferAgainstModel, settings=QUICK)
