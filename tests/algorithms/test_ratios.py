import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.algorithms.ratios import (
    LOG_RATIO_BOUND,
    bounded_weights,
    importance_ratio,
    negative_drift,
    policy_ratio,
    second_moment_outliers,
)
from tests.algorithms.menu import double

SEGMENTS, LENGTHS = torch.tensor([1, 0, 1, 1, 0]), torch.tensor([2, 3])
"""Five tokens of two conversations, interleaved."""


def test_ratio_is_bounded_in_both_directions():
    log_ratio = double(-1e4, -21.0, 0.0, 1.0, 21.0, 1e4)
    bound = math.exp(LOG_RATIO_BOUND)
    torch.testing.assert_close(importance_ratio(log_ratio), double(1 / bound, 1 / bound, 1.0, math.e, bound, bound))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", (8.0, 3.0, 1.0, 1.0, 3.0)),
        # Conversation 1 has the tokens 8, 1, 1 and conversation 0 the tokens 3, 3.
        ("sequence", (8.0, 9.0, 8.0, 8.0, 9.0)),
        ("geometric", (2.0, 3.0, 2.0, 2.0, 3.0)),
    ],
)
def test_ratio_at_each_level_and_its_gradient(level, expected):
    log_ratio = double(8.0, 3.0, 1.0, 1.0, 3.0).log().requires_grad_()
    ratio = policy_ratio(log_ratio, SEGMENTS, LENGTHS, level)
    torch.testing.assert_close(ratio, double(*expected))
    # Each token's slope by its own log-ratio is the ratio, and by any other's 0.
    jacobian = torch.autograd.functional.jacobian(lambda x: policy_ratio(x, SEGMENTS, LENGTHS, level), log_ratio)
    torch.testing.assert_close(jacobian, torch.diag(double(*expected)))


def test_the_ratio_of_a_long_conversation_is_bounded_and_loses_its_gradient():
    log_ratio = torch.full((100,), 0.5, dtype=torch.float64, requires_grad=True)
    ratio = policy_ratio(log_ratio, torch.zeros(100, dtype=torch.int64), torch.tensor([100]), "sequence")
    torch.testing.assert_close(ratio.detach(), torch.full((100,), math.exp(20.0), dtype=torch.float64))
    (slope,) = torch.autograd.grad(ratio.sum(), log_ratio)
    assert not slope.any()


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.floats(0.0, 1.0), st.floats(1.0, 5.0))
def test_weights_are_bounded_constants(values, floor, cap):
    ratio = double(*values).requires_grad_()
    truncated, above = bounded_weights(ratio, "truncate", floor, cap)
    masked, outside = bounded_weights(ratio, "mask", floor, cap)
    assert not truncated.requires_grad
    assert not masked.requires_grad
    assert truncated.tolist() == [min(value, cap) for value in values]
    assert above.tolist() == [value > cap for value in values]
    assert masked.tolist() == [value if floor <= value <= cap else 0.0 for value in values]
    assert outside.tolist() == [not floor <= value <= cap for value in values]


def test_only_negative_advantages_of_drifted_conversations_are_masked():
    # The mean of log(behavior / current) is (0.5 + 0.1 + 0.6) / 3 = 0.4 in conversation 1 and 0.2 in conversation 0.
    log_ratio, advantages = double(-0.5, -0.2, -0.1, -0.6, -0.2), double(-1.0, -1.0, 2.0, -3.0, 0.0)
    masked = {
        threshold: negative_drift(log_ratio, advantages, SEGMENTS, LENGTHS, threshold).tolist()
        for threshold in (0.1, 0.3, 0.5)
    }
    assert masked[0.1] == [True, True, False, True, False]
    assert masked[0.3] == [True, False, False, True, False]
    assert not any(masked[0.5])
    assert not negative_drift(-log_ratio, advantages, SEGMENTS, LENGTHS, 0.1).any()


def test_the_largest_squares_are_dropped_until_the_mean_of_the_rest_is_within_bounds():
    # Squares 0.01, 0.04, 0.09 and 0.16 have the running means 0.01, 0.025, 0.0467 and 0.075.
    log_ratio, advantages = double(0.4, -0.2, 0.3, 0.1), double(1.0, -1.0, 2.0, 0.5)
    segments, lengths = torch.zeros(4, dtype=torch.int64), torch.tensor([4])
    for bound, kept in ((0.009, 0), (0.02, 1), (0.03, 2), (0.05, 3), (0.08, 4)):
        outliers = second_moment_outliers(log_ratio, advantages, segments, lengths, bound)
        assert outliers.tolist() == [kept < 4, kept < 2, kept < 3, kept < 1], bound


def test_an_infinite_log_ratio_is_dropped_and_leaves_other_conversations_alone():
    log_ratio, advantages = double(math.inf, 0.1, 0.1, 0.4), torch.ones(4).double()
    outliers = second_moment_outliers(log_ratio, advantages, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]), 0.04)
    # Means of squares: 0.01 and infinity; 0.01 and 0.085.
    assert outliers.tolist() == [True, False, False, True]


def test_tokens_that_move_back_towards_one_are_never_dropped():
    log_ratio, advantages = double(3.0, -3.0, 0.1, 5.0), double(-1.0, 1.0, 1.0, 0.0)
    segments, lengths = torch.zeros(4, dtype=torch.int64), torch.tensor([4])
    assert not second_moment_outliers(log_ratio, advantages, segments, lengths, 0.04).any()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=20),
    st.floats(0.001, 1.0),
)
def test_outliers_are_those_of_dropping_one_after_another(tokens, bound):
    owners, log_ratios, advantages = zip(*tokens, strict=True)
    segments, lengths = torch.tensor(owners), torch.bincount(torch.tensor(owners), minlength=4)
    outliers = second_moment_outliers(double(*log_ratios), double(*advantages), segments, lengths, bound)
    for owner in range(4):
        held = [i for i in range(len(tokens)) if owners[i] == owner and log_ratios[i] * advantages[i] > 0]
        squares = sorted((log_ratios[i] ** 2 for i in held), reverse=True)
        while squares and sum(squares) / len(squares) > bound:
            squares.pop(0)
        kept = sorted((log_ratios[i] ** 2 for i in held if not outliers[i]), reverse=True)
        if not math.isclose(sum(kept), bound * len(kept), rel_tol=1e-9):
            assert kept == pytest.approx(squares)
