"""Estimates of a critic by hand on three tokens, and against the sums that define them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.algorithms.values import (
    explained_variance,
    gae,
    recurrence,
    value_loss,
    value_moments,
    vtrace,
)
from tests.algorithms.menu import double

REWARDS, VALUES, ONE = double(0, 0, 1), double(0.5, 0.25, 0.75), torch.zeros(3, dtype=torch.int64)
RATIOS = double(2, 0.5, 1)


def test_gae_of_three_tokens():
    found = gae(REWARDS, VALUES, ONE, gamma=0.5, lam=0.5)
    assert found.td_errors.tolist() == [-0.375, 0.125, 0.25]
    assert found.advantages.tolist() == [-0.328125, 0.1875, 0.25]
    assert found.returns.tolist() == [0.171875, 0.4375, 1.0]


def test_gae_ends_at_the_end_of_a_conversation():
    found = gae(REWARDS, VALUES, torch.tensor([0, 0, 1]), gamma=0.5, lam=0.5)
    assert found.td_errors.tolist() == [-0.375, -0.25, 0.25]
    assert found.advantages.tolist() == [-0.375 - 0.25 * 0.25, -0.25, 0.25]


@pytest.mark.parametrize(
    ("lam", "rho_bar", "c_bar", "returns", "advantages"),
    [
        (1.0, 1.0, 1.0, [0.1875, 0.375, 1.0], [-0.3125, 0.25, 0.25]),
        (0.5, 2.0, 2.0, [-0.203125, 0.34375, 1.0], [-0.328125, 0.25, 0.25]),
    ],
)
def test_vtrace_of_three_tokens(lam, rho_bar, c_bar, returns, advantages):
    found = vtrace(REWARDS, VALUES, ONE, RATIOS.log(), gamma=0.5, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    torch.testing.assert_close(found.returns, double(*returns))
    torch.testing.assert_close(found.advantages, double(*advantages))
    assert found.td_errors.tolist() == [-0.375, 0.125, 0.25]


def test_a_squared_error_is_halved_and_clipped_around_the_old_value():
    values = double(1, 0, 3).requires_grad_()
    loss, clipped = value_loss(values, double(0, 0, 0), double(2, 1, 0), clip=0.5)
    assert loss.tolist() == [1.125, 0.5, 4.5]
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert values.grad.tolist() == [0.0, -1.0, 3.0]
    loss, clipped = value_loss(values.detach(), double(0, 0, 0), double(2, 1, 0), clip=None)
    assert (loss.tolist(), clipped.any()) == ([0.5, 0.5, 4.5], False)


conversations = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def random(lengths: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, log_ratio = (torch.randn(sum(lengths), generator=generator, dtype=torch.float64) for _ in range(3))
    return rewards, values, log_ratio, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


@given(lengths=conversations, gamma=st.floats(0.1, 1), lam=st.floats(0, 1), seed=st.integers(0, 9))
def test_gae_is_the_discounted_sum_of_td_errors_within_each_conversation(lengths, gamma, lam, seed):
    rewards, values, _, segments = random(lengths, seed)
    found, start = gae(rewards, values, segments, gamma, lam), 0
    for length in lengths:
        own, bootstrap = values[start : start + length], double(0)
        errors = rewards[start : start + length] + gamma * torch.cat([own[1:], bootstrap]) - own
        for t in range(length):
            expected = sum((gamma * lam) ** k * errors[t + k] for k in range(length - t))
            torch.testing.assert_close(found.advantages[start + t], expected)
        start += length


@given(lengths=conversations, gamma=st.floats(0.1, 1), bounds=st.sampled_from([(1, 1), (2, 1), (3, 0.5)]))
def test_vtrace_is_the_sum_of_equation_1(lengths, gamma, bounds):
    rewards, values, log_ratio, segments = random(lengths, 0)
    found, start, (rho_bar, c_bar) = vtrace(rewards, values, segments, log_ratio, gamma, 0.9, *bounds), 0, bounds
    for length in lengths:
        part = slice(start, start + length)
        own, ratio = values[part], log_ratio[part].exp()
        errors = ratio.clamp(max=rho_bar) * (rewards[part] + gamma * torch.cat([own[1:], double(0)]) - own)
        traces = 0.9 * ratio.clamp(max=c_bar)
        for t in range(length):
            terms = [gamma ** (k - t) * traces[t:k].prod() * errors[k] for k in range(t, length)]
            torch.testing.assert_close(found.returns[start + t], own[t] + sum(terms))
        start += length


@given(lengths=conversations, lam=st.floats(0, 1))
def test_on_policy_vtrace_returns_are_those_of_gae(lengths, lam):
    rewards, values, log_ratio, segments = random(lengths, 1)
    expected = gae(rewards, values, segments, 0.9, lam)
    found = vtrace(rewards, values, segments, 0 * log_ratio, 0.9, lam, 1.0, 1.0)
    torch.testing.assert_close(found.returns, expected.returns)
    if lam == 1:
        torch.testing.assert_close(found.advantages, expected.advantages)


def test_vtrace_gives_up_on_a_token_that_the_policy_has_abandoned():
    """Nothing after it reaches what is before, and it has no error of its own."""
    found = vtrace(REWARDS, VALUES, ONE, double(0, -19, 0), gamma=1.0, lam=1.0, rho_bar=1.0, c_bar=1.0)
    torch.testing.assert_close(found.returns, double(0.25, 0.25, 1.0), atol=1e-7, rtol=0)


def test_the_recurrence_reaches_across_a_long_conversation():
    count = 10_001
    sums = recurrence(torch.ones(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64))
    assert sums[0] == count
    decayed = recurrence(double(*[0.0] * 500, 1.0), double(*[0.99] * 500, 0.0))
    torch.testing.assert_close(decayed, 0.99 ** torch.arange(500, -1, -1, dtype=torch.float64))


def test_explained_variance_of_parts_is_that_of_the_whole():
    returns, values = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([1.0, 2.0, 4.0, 5.0])
    whole = explained_variance(value_moments(values, returns))
    assert whole == pytest.approx(1 - 0.5 / 3.5)
    parts = value_moments(values[:1], returns[:1]) + value_moments(values[1:], returns[1:])
    assert explained_variance(parts) == pytest.approx(whole)
    assert explained_variance(value_moments(returns, returns)) == 1.0
    assert explained_variance(value_moments(torch.full((4,), 9.0), returns)) == pytest.approx(0.0)
    assert math.isnan(explained_variance(value_moments(values, torch.ones(4))))
    assert math.isnan(explained_variance(value_moments(values[:0], returns[:0])))
