import math

import numpy as np
import pytest

from freshper_lightning.replay import ExponentialDecay, InverseDecay, NoDecay, WindowDecay

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
