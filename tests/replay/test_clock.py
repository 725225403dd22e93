"""What clocks read, and that a buffer takes any of them: real numbers as well as counts."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.algorithms.losses import k3
from freshper_lightning.replay import CLOCKS, ExponentialDecay, HardAge, InverseDecay, WindowDecay, clock_value, reshard
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import assert_same, make_buffer, make_trajectory, of_rewards
from tests.replay.model import assert_exact, exact_probabilities, exponential, inverse

REAL = ("lr_path", "drift", "drift_length")
FIELDS = {name: name for name in CLOCKS} | {"iterations": "iteration"}


def test_each_clock_reads_its_own_field():
    reading = ClockReading(updates=7, iteration=3, lr_path=0.5, drift=0.25, drift_length=1.5)
    assert [clock_value(reading, clock) for clock in CLOCKS] == [7, 3, 0.5, 0.25, 1.5]
    assert set(FIELDS.values()) == set(ClockReading.__dataclass_fields__), "each field is the clock of some buffer"


def test_an_unknown_clock_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="updates, iterations, lr_path, drift, drift_length, not 'hours'"):
        clock_value(ClockReading(), "hours")


def test_an_applied_update_advances_the_clocks_by_its_learning_rate_and_drift():
    reading = ClockReading(iteration=4)
    for learning_rate, drift in ((0.5, 0.125), (0.25, 0.0), (0.125, 2.0)):
        reading = reading.after_update(learning_rate, drift)
    assert reading == ClockReading(updates=3, iteration=4, lr_path=0.875, drift=2.125, drift_length=0.5 + 2.0)
    assert ClockReading(drift=0.5).after_update(0.1) == ClockReading(updates=1, lr_path=0.1, drift=0.5)


def readings(steps):
    """The reading after one update of each drift."""
    reading = ClockReading()
    for drift in steps:
        reading = reading.after_update(1.0, drift)
    return reading


@pytest.mark.parametrize("distance", [0.3, 2.0])
def test_the_sum_of_divergences_of_a_gaussian_depends_on_the_step_size_and_its_path_does_not(distance):
    """KL(N(a, 1) || N(b, 1)) is (b - a)**2 / 2: m equal steps add up to the KL of the ends over m."""
    for steps in (1, 4, 25):
        reading = readings([(distance / steps) ** 2 / 2] * steps)
        assert reading.drift == pytest.approx(distance**2 / 2 / steps, rel=1e-12)
        assert reading.drift_length == pytest.approx(distance, rel=1e-12)


def softmax_drifts(start, end, steps):
    """Exact d = E[r - 1 - ln r] of each of ``steps`` equal steps of the logits."""
    fractions = torch.linspace(0, 1, steps + 1, dtype=torch.float64)[:, None]
    log_probs = (start + fractions * (end - start)).log_softmax(-1)
    log_ratios = log_probs[1:] - log_probs[:-1]
    return (log_probs[:-1].exp() * k3(log_ratios)).sum(-1).tolist()


def test_the_same_holds_for_a_softmax_policy_whose_logits_move_along_a_line():
    generator = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 20, generator=generator, dtype=torch.float64)
    (whole,) = softmax_drifts(start, end, 1)
    few, many, more = (readings(softmax_drifts(start, end, steps)) for steps in (20, 80, 320))
    assert few.drift < 0.1 * whole
    assert few.drift / many.drift == pytest.approx(4, rel=0.05)
    assert many.drift / more.drift == pytest.approx(4, rel=0.02)
    assert few.drift_length == pytest.approx(many.drift_length, rel=0.01)
    assert many.drift_length == pytest.approx(more.drift_length, rel=0.002)


@pytest.mark.parametrize("clock", CLOCKS)
def test_probabilities_fall_by_e_every_tau_over_alpha_units_of_the_clock(clock):
    buffer = make_buffer(clock=clock, decay=ExponentialDecay(tau=2.0), alpha=0.5)
    values = [0, 1, 3] if clock in ("updates", "iterations") else [0.0, 0.375, 1.7]
    for value in values:
        buffer.add(of_rewards(1), ClockReading(**{FIELDS[clock]: value}))
    now = ClockReading(**{FIELDS[clock]: 4})
    expected = np.exp([-0.5 * (4 - value) / 2.0 for value in values])
    assert buffer.ages(now).tolist() == [4.0 - value for value in values]
    assert buffer.probabilities(now) == pytest.approx(expected / expected.sum(), rel=1e-14)


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.tuples(st.floats(1e-6, 10), st.floats(0, 3)), min_size=1, max_size=12),
    later=st.floats(0, 3),
    unit=st.sampled_from([1e-6, 1e-3, 1.0]),
    alpha=st.sampled_from([0.3, 0.6, 1.0]),
    clock=st.sampled_from(REAL),
)
@pytest.mark.parametrize("factorises", [True, False])
def test_probabilities_are_exact_for_real_clocks_of_any_unit(factorises, entries, later, unit, alpha, clock):
    """``unit`` is tau under the exponential decay; the inverse has no unit of its own."""
    decay, exact = (ExponentialDecay(tau=unit), exponential(unit)) if factorises else (InverseDecay(), inverse)
    buffer, rows, now = make_buffer(clock=clock, decay=decay, alpha=alpha), [], 0.0
    for base, step in entries:
        now += unit * step
        buffer.add(of_rewards(1.0), ClockReading(**{clock: now}), priorities=[base])
        rows.append((base, 0.0, now))
    now += unit * later
    found = buffer.probabilities(ClockReading(**{clock: now}))
    assert_exact(found, exact_probabilities(rows, now, alpha, exact))


def test_a_window_and_a_hard_age_are_in_units_of_the_clock():
    buffer = make_buffer(clock="drift", decay=WindowDecay(max_age=0.5), eviction=HardAge(max_age=1.0))
    for drift in (0.0, 0.25, 0.75):
        buffer.add(of_rewards(1), ClockReading(drift=drift))
    assert buffer.probabilities(ClockReading(drift=0.8125)).tolist() == [0, 0, 1]
    buffer.add(of_rewards(1), ClockReading(drift=1.125))
    assert buffer.ids().tolist() == [1, 2, 3]


def test_a_clock_of_real_numbers_that_runs_backwards_or_breaks_is_refused():
    buffer = make_buffer(clock="drift")
    buffer.add(of_rewards(1), ClockReading(drift=0.3))
    for drift, message in (
        (math.nextafter(0.3, 0), r"now \(drift\) must be at least 0.3"),
        (math.nan, "finite, not nan"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.sample(1, ClockReading(drift=drift), beta=0.4)


def test_state_and_shards_keep_every_bit_of_a_real_clock():
    buffer, reading = make_buffer(clock="drift", decay=ExponentialDecay(tau=0.01), alpha=0.6), ClockReading()
    for index in range(6):
        reading = reading.after_update(1e-3 / 3, 1e-3 / 7)
        buffer.add([make_trajectory(born=reading, group=index)], reading)
    buffer.observe([2], [-0.1], reading)
    now, file = reading.after_update(1e-3, 0.1 / 3), io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = make_buffer(clock="drift", decay=ExponentialDecay(tau=0.01), alpha=0.6)
    other.load_state_dict(state)
    assert other.ages(now).tobytes() == buffer.ages(now).tobytes()
    assert other.probabilities(now).tobytes() == buffer.probabilities(now).tobytes()
    for mine, copy in zip(buffer.get(buffer.ids()), other.get(other.ids()), strict=True):
        assert_same(mine, copy)
    ages = []
    for shard in reshard([state], 2):
        part = make_buffer(clock="drift", decay=ExponentialDecay(tau=0.01), alpha=0.6)
        part.load_state_dict(shard.state)
        ages += part.ages(now).tolist()
    assert sorted(ages) == sorted(buffer.ages(now).tolist())
