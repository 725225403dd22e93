import math

import numpy as np
import pytest

from freshper_lightning.replay import Decay, ExponentialDecay, InverseDecay, NoDecay, WindowDecay
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_buffer, of_rewards

AGES = np.array([0.0, 1.0, 50.0, 1e9])


def test_exponential_decay_falls_by_e_every_tau():
    assert ExponentialDecay(tau=50).log_factor(AGES).tolist() == [0, -0.02, -1, -2e7]


def test_no_decay_keeps_everything_fresh():
    assert NoDecay().log_factor(AGES).tolist() == [0, 0, 0, 0]


def test_a_tau_too_small_for_floats_means_no_freshness_left():
    assert ExponentialDecay(tau=1e-300).log_factor(AGES)[-1] == -math.inf


def test_inverse_decay_is_one_over_one_plus_age():
    assert np.exp(InverseDecay().log_factor(AGES)) == pytest.approx(1 / (1 + AGES), rel=1e-14)


def test_a_window_ends_sharply_behind_its_greatest_age():
    assert WindowDecay(max_age=50).log_factor(np.array([0.0, 50.0, 50.5, 51.0])).tolist() == [0, 0, -np.inf, -np.inf]


@pytest.mark.parametrize("max_age", [-1.0, math.inf, math.nan])
def test_a_bad_window_is_refused(max_age):
    with pytest.raises(ValueError, match="max_age must be finite and at least 0"):
        WindowDecay(max_age=max_age)


@pytest.mark.parametrize("decay", [InverseDecay(), WindowDecay(3)])
def test_decays_that_do_not_factorise_say_so(decay):
    assert not decay.factorises


@pytest.mark.parametrize("decay", [ExponentialDecay(tau=7), NoDecay()])
def test_decays_that_claim_to_factorise_do(decay):
    assert decay.factorises
    one, other = np.array([3.0, 10.0]), np.array([11.0, -5.0])
    parts = decay.log_factor(one) + decay.log_factor(other)
    assert decay.log_factor(one + other) == pytest.approx(parts, rel=1e-15)


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_tau_is_refused(tau):
    with pytest.raises(ValueError, match="tau must be finite and above 0"):
        ExponentialDecay(tau=tau)


def test_decays_compare_by_their_parameters():
    assert ExponentialDecay(tau=5) == ExponentialDecay(tau=5) != ExponentialDecay(tau=6)


class Broken(Decay):
    """Returns what it is told to for ages above 1."""

    def __init__(self, value, factorises=False):
        self.value, self.factorises = value, factorises

    def __repr__(self):
        return f"Broken({self.value})"

    def log_factor(self, age):
        return np.where(age > 1, self.value, 0.0)


@pytest.mark.parametrize("value", [math.nan, 1e-9, math.inf])
@pytest.mark.parametrize("use", ["sample", "probabilities"])
def test_a_decay_that_returns_no_freshness_is_named(value, use):
    buffer = make_buffer(decay=Broken(value), asynchronous=False)
    buffer.add(of_rewards(1, 2), ClockReading())
    now = ClockReading(updates=1)
    buffer.probabilities(now)
    now = ClockReading(updates=2)
    call = (lambda: buffer.sample(2, now, beta=0.4)) if use == "sample" else (lambda: getattr(buffer, use)(now))
    with pytest.raises(
        ValueError, match=rf"log_factor of Broken\({value}\) must be at most 0, not {value} as at age 2"
    ):
        call()


def test_a_decay_that_factorises_is_looked_at_too():
    buffer = make_buffer(decay=Broken(math.nan, factorises=True))
    buffer.add(of_rewards(1), ClockReading())
    with pytest.raises(ValueError, match=r"log_factor of Broken\(nan\)"):
        buffer.add(of_rewards(2), ClockReading(updates=5)), buffer.update_priorities([0], [1e300])


def test_a_decay_that_does_not_answer_every_age_is_named():
    class Scalar(NoDecay):
        factorises = False

        def log_factor(self, age):
            return np.float64(0.0)

    buffer = make_buffer(decay=Scalar(), asynchronous=False)
    buffer.add(of_rewards(1, 2), ClockReading())
    with pytest.raises(ValueError, match=r"log_factor of .*Scalar.* one number for each age \(2,\), not \(\)"):
        buffer.sample(1, ClockReading(), beta=0.4)
