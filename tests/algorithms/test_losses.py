import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.algorithms.losses import (
    aggregation_coefficients,
    clipped_surrogate,
    clipped_weight_surrogate,
    k3,
    kl_loss,
    weighted_loss,
)

RATIOS = st.floats(0.01, 10.0)
ADVANTAGES = st.floats(-3.0, 3.0)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def surrogate_and_slope(ratio, advantage, low=0.2, high=0.2, dual=None):
    """Surrogate, its derivative by the ratio, and the clip flag, for one token."""
    rho = double(ratio).requires_grad_()
    surrogate, clipped = clipped_surrogate(rho, double(advantage), low, high, dual)
    (slope,) = torch.autograd.grad(surrogate.sum(), rho)
    return surrogate.item(), slope.item(), clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "slope", "clipped"),
    [
        (1.1, 2.0, 2.2, 2.0, False),
        (1.5, 2.0, 2.4, 0.0, True),
        (0.5, 2.0, 1.0, 2.0, False),
        (0.9, -2.0, -1.8, -2.0, False),
        (0.5, -2.0, -1.6, 0.0, True),
        (1.5, -2.0, -3.0, -2.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
        (0.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_clip_acts_only_on_the_side_that_the_advantage_pushes_to(ratio, advantage, surrogate, slope, clipped):
    assert surrogate_and_slope(ratio, advantage) == (pytest.approx(surrogate), pytest.approx(slope), clipped)


def test_the_two_sides_have_their_own_distance():
    assert surrogate_and_slope(1.25, 1.0, low=0.1, high=0.28) == (pytest.approx(1.25), 1.0, False)
    assert surrogate_and_slope(1.30, 1.0, low=0.1, high=0.28) == (pytest.approx(1.28), 0.0, True)
    assert surrogate_and_slope(0.85, -1.0, low=0.1, high=0.28) == (pytest.approx(-0.9), 0.0, True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "slope", "clipped"),
    [
        (2.9, -1.0, -2.9, -1.0, False),
        (5.0, -1.0, -3.0, 0.0, True),
        (5.0, 1.0, 1.2, 0.0, True),
        (0.5, -1.0, -0.8, 0.0, True),
    ],
)
def test_dual_clip_bounds_the_ratio_of_negative_advantages(ratio, advantage, surrogate, slope, clipped):
    result = surrogate_and_slope(ratio, advantage, dual=3.0)
    assert result == (pytest.approx(surrogate), pytest.approx(slope), clipped)


@given(RATIOS, ADVANTAGES, st.floats(0.05, 0.9), st.floats(0.05, 3.0), st.one_of(st.none(), st.floats(1.01, 5.0)))
def test_clamping_the_ratio_equals_the_minimum_and_maximum_of_the_papers(ratio, advantage, low, high, dual):
    expected = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        expected = max(expected, dual * advantage)
    surrogate, slope, clipped = surrogate_and_slope(ratio, advantage, low, high, dual)
    assert surrogate == pytest.approx(expected)
    assert slope == pytest.approx(0.0 if clipped else advantage)


@given(RATIOS, ADVANTAGES, st.floats(0.05, 1.0), st.floats(0.05, 5.0))
def test_a_clipped_weight_is_a_bounded_constant(ratio, advantage, low, high):
    log_prob = double(-0.7).requires_grad_()
    rho = double(ratio).requires_grad_()
    surrogate, clipped = clipped_weight_surrogate(log_prob, rho, double(advantage), low, high)
    slope, by_ratio = torch.autograd.grad(surrogate.sum(), [log_prob, rho], allow_unused=True)
    assert float(slope) == pytest.approx(min(max(ratio, 1 - low), 1 + high) * advantage)
    assert by_ratio is None
    assert bool(clipped) == (ratio < 1 - low or ratio > 1 + high)


def test_k1_is_refused_as_a_loss():
    with pytest.raises(ValueError, match="'k1' has no expected gradient as a loss; allowed are k2, k3"):
        kl_loss(double(-1.0), double(-1.0), "k1", None)


def test_beyond_its_bound_k3_pushes_nowhere_whatever_the_ratio():
    log_probs = torch.tensor([-25.0, -4.0], dtype=torch.float64, requires_grad=True)
    ratio = (log_probs - torch.tensor([-22.0, -3.0], dtype=torch.float64)).exp()
    kl_loss(log_probs, torch.tensor([-0.5, -0.5], dtype=torch.float64), "k3", ratio).sum().backward()
    assert log_probs.grad[0] == 0
    assert log_probs.grad[1] < 0, "within it a token that the reference prefers is pulled up"


def test_k3_matches_its_formula_and_gradient():
    log_ratio = double(math.log(2), 0.0, math.log(0.5)).requires_grad_()
    estimate = k3(log_ratio)
    torch.testing.assert_close(estimate, double(1 - math.log(2), 0.0, math.log(2) - 0.5))
    (slope,) = torch.autograd.grad(estimate.sum(), log_ratio)
    torch.testing.assert_close(slope, double(1.0, 0.0, -0.5))


@given(st.floats(-1e4, 1e4))
def test_k3_is_finite_and_not_negative(log_ratio):
    value = float(k3(torch.tensor([log_ratio], dtype=torch.float64)))
    assert 0.0 <= value < math.inf


def test_k3_keeps_its_digits_near_zero():
    # For small x it is x**2 / 2 + x**3 / 6; the difference of exp(x) and 1 + x has no digit left in float32.
    assert float(k3(torch.tensor([1e-3]))) == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-3)


def test_k3_averages_to_the_divergence_under_the_sampling_policy():
    generator = torch.Generator().manual_seed(0)
    behavior, current = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (behavior.exp() * (behavior - current)).sum()
    torch.testing.assert_close((behavior.exp() * k3(current - behavior)).sum(), expected)


KINDS = [("token_mean", None), ("sequence_mean", None), ("sequence_sum", None), ("constant", 8.0)]


@pytest.mark.parametrize(
    ("kind", "constant", "expected"),
    [
        ("token_mean", None, [1 / 20, 1 / 20, 1 / 20]),
        ("sequence_mean", None, [1 / (2 * 5), 1 / (2 * 5), 1 / (1 * 5)]),
        ("sequence_sum", None, [1 / 5, 1 / 5, 1 / 5]),
        ("constant", 8.0, [1 / 40, 1 / 40, 1 / 40]),
    ],
)
def test_coefficients_of_three_tokens_in_two_trajectories(kind, constant, expected):
    segments, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    coefficients = aggregation_coefficients(kind, segments, lengths, 20.0, 5.0, constant)
    assert coefficients.dtype == torch.float32
    torch.testing.assert_close(coefficients, torch.tensor(expected))


@pytest.mark.parametrize(("kind", "constant"), KINDS)
def test_totals_of_zero_give_coefficients_of_zero(kind, constant):
    coefficients = aggregation_coefficients(kind, torch.tensor([0, 0, 1]), torch.tensor([2, 1]), 0.0, 0.0, constant)
    assert coefficients.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("kind", "constant"), KINDS)
def test_a_micro_batch_without_tokens_has_no_coefficients(kind, constant):
    empty = torch.empty(0, dtype=torch.int64)
    assert aggregation_coefficients(kind, empty, empty, 20.0, 5.0, constant).shape == (0,)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="token_mean, sequence_mean, sequence_sum, constant, not 'batch_mean'"):
        aggregation_coefficients("batch_mean", torch.tensor([0]), torch.tensor([1]), 1.0, 1.0)


@pytest.mark.parametrize(("kind", "constant"), [("constant", None), ("token_mean", 8.0)])
def test_a_divisor_goes_with_the_constant_aggregation_and_no_other(kind, constant):
    with pytest.raises(ValueError, match=f"the divisor of aggregation '{kind}' cannot be {constant}"):
        aggregation_coefficients(kind, torch.tensor([0]), torch.tensor([1]), 1.0, 1.0, constant)


def test_only_the_token_loss_has_a_gradient():
    token_loss, coefficients, weights = (double(1.0, 2.0).requires_grad_() for _ in range(3))
    weighted_loss(token_loss, coefficients, weights).backward()
    assert token_loss.grad.tolist() == [1.0, 4.0]
    assert coefficients.grad is None
    assert weights.grad is None
