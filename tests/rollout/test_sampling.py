import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.rollout.sampling import (
    SamplingConfig,
    Truncation,
    draw,
    penalize_repetition,
    truncate,
    uniforms,
)


def hashed(seeds, positions):
    return uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(0, 2**63 - 1))
def test_a_uniform_depends_on_its_own_seed_and_position_alone(seed, position, other):
    alone = hashed([seed], [position])[0]
    assert 0 <= alone < 1
    assert hashed([other, seed], [0, position])[1] == alone
    assert hashed([seed], [position + 1])[0] != alone


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_uniforms_are_uniform_and_uncorrelated_along_either_axis(axis):
    count = 100_000
    line, fixed = np.arange(count), np.full(count, 7)
    values = hashed(line, fixed) if axis == "seeds" else hashed(fixed, line)
    cells = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = float(((cells - count / 100) ** 2 / (count / 100)).sum())
    assert 50 < chi_square < 165
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.015


def test_splitmix_agrees_with_arithmetic_in_python_integers():
    def mix(state):
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, position in [(0, 0), (5, 3), (2**63 - 1, 10**6)]:
        bits = mix((mix((seed + gamma) % 2**64) + (position + 1) * gamma) % 2**64)
        assert hashed([seed], [position])[0] == (bits >> 11) / 2**53


@given(st.lists(st.floats(-30, 5), min_size=2, max_size=30), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_distribution(logits, uniform):
    log_probs = torch.tensor([logits]).log_softmax(-1)
    token = int(draw(log_probs, torch.tensor([uniform], dtype=torch.float64))[0])
    cumulative = log_probs.double().exp().cumsum(-1)[0]
    below = float(cumulative[token - 1]) if token else 0.0
    assert below <= uniform * float(cumulative[-1]) + 1e-15
    assert float(cumulative[token]) > below


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 20]] = 0.0
    token = int(draw(logits.log_softmax(-1), torch.tensor([uniform], dtype=torch.float64))[0])
    assert token in (3, 20)


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=20, unique=True), st.integers(1, 25), st.floats(0.05, 1))
def test_truncation_keeps_the_smallest_set_of_most_likely_tokens(logits, top_k, top_p):
    row = torch.tensor([logits], dtype=torch.float64)
    kept = truncate(row, top_k, top_p)[0].isfinite()
    likely = row[0].sort(descending=True).indices[:top_k]
    probabilities = row[0, likely].softmax(0)
    needed = next((n for n in range(1, len(likely)) if float(probabilities[:n].sum()) >= top_p), len(likely))
    boundary = float(probabilities[:needed].sum())
    if abs(boundary - top_p) > 1e-9:
        assert sorted(kept.nonzero()[:, 0].tolist()) == sorted(likely[:needed].tolist())


def test_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits, seen = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0]]


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9}, {"top_k": 20}, {"min_tokens": 1}, {"repetition_penalty": 1.1}],
    ids=lambda f: next(iter(f)),
)
def test_settings_that_break_parity_are_refused_unless_it_is_given_up(fields):
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=rf"{name}={value}.*allow_mismatch=true"):
        SamplingConfig(**fields)
    allowed = SamplingConfig(**fields, allow_mismatch=True)
    assert allowed.truncation() == Truncation(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": 0.001},
        {"max_tokens": 0},
        {"top_p": 0.0},
        {"top_p": 1.2},
        {"top_k": -1},
        {"min_tokens": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(fields):
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=rf"{name} must be .*{value}"):
        SamplingConfig(**fields, allow_mismatch=True)


def test_no_more_tokens_can_be_wanted_than_are_allowed():
    with pytest.raises(ValueError, match="min_tokens=41 must be at most max_tokens=40"):
        SamplingConfig(min_tokens=41, allow_mismatch=True)


def test_defaults_are_neutral():
    assert SamplingConfig().truncation() == Truncation()
