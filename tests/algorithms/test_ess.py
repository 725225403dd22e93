import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.algorithms.ess import (
    bucketed,
    effective_sample_size,
    ess_of_moments,
    ess_ratio,
    ess_ratio_by_age,
    pooled_moments,
    sequence_log_weights,
    weight_moments,
)

log_weight_lists = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=30)


def test_matches_kish_on_three_weights():
    # Weights 1, 2, 3: (1 + 2 + 3)**2 / (1 + 4 + 9) = 36 / 14.
    assert effective_sample_size(torch.tensor([1.0, 2.0, 3.0]).log()) == pytest.approx(36 / 14, rel=1e-6)
    assert ess_ratio(torch.tensor([1.0, 2.0, 3.0]).log()) == pytest.approx(12 / 14, rel=1e-6)


@pytest.mark.parametrize("level", [-1e4, 0.0, 1e4])
def test_equal_weights_are_worth_their_number(level):
    assert effective_sample_size(torch.full((17,), level)) == pytest.approx(17, rel=1e-9)


def test_one_dominating_weight_is_worth_one():
    assert effective_sample_size(torch.tensor([1e4, -1e4, -1e4])) == 1.0
    assert effective_sample_size(torch.tensor([0.0, -30.0, -30.0])) == pytest.approx(1.0)


@given(log_weight_lists)
def test_lies_between_one_and_the_number_of_samples(values):
    size = effective_sample_size(torch.tensor(values))
    assert 1.0 <= size <= len(values)
    assert 0.0 < ess_ratio(torch.tensor(values)) <= 1.0


@given(log_weight_lists, st.floats(-1e4, 1e4))
def test_a_common_factor_changes_nothing(values, shift):
    weights = torch.tensor(values, dtype=torch.float64)
    assert effective_sample_size(weights + shift) == pytest.approx(effective_sample_size(weights), rel=1e-6)


def test_weightless_samples_do_not_count():
    assert effective_sample_size(torch.tensor([0.0, -math.inf, 0.0])) == pytest.approx(2.0)


@pytest.mark.parametrize("values", [[], [-math.inf, -math.inf]])
def test_no_weight_at_all_is_nan_without_a_warning(values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(effective_sample_size(torch.tensor(values)))
        assert math.isnan(ess_ratio(torch.tensor(values)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="log_weights"):
        effective_sample_size(torch.tensor([0.0, value]))


def test_gradient_and_precision_of_the_input_do_not_matter():
    weights = torch.tensor([0.5, 0.25], dtype=torch.bfloat16, requires_grad=True)
    assert effective_sample_size(weights) == effective_sample_size(weights.detach().double())


def test_buckets_are_half_open_and_named_by_their_edges():
    masks = bucketed(torch.tensor([0, 1, 9, 10, 500]), (1, 10))
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "0-1": [True, False, False, False, False],
        "1-10": [False, True, True, False, False],
        "10-inf": [False, False, False, True, True],
    }


@given(
    st.lists(st.floats(0, 1e6), max_size=20),
    st.lists(st.floats(0.001, 1e6), unique=True, min_size=1, max_size=5).map(sorted),
)
def test_every_age_is_in_exactly_one_bucket(ages, edges):
    masks = bucketed(torch.tensor(ages, dtype=torch.float64), edges)
    assert torch.stack(list(masks.values())).sum(0).eq(1).all()


@pytest.mark.parametrize("edges", [(0, 1), (5, 5), (5, 2), (-1,), (math.inf,)])
def test_edges_that_are_not_positive_and_increasing_are_refused(edges):
    with pytest.raises(ValueError, match="age edges"):
        bucketed(torch.tensor([1.0]), edges)


def test_effective_size_is_taken_inside_each_age_bucket():
    # Young: equal weights, 2 of 2. Old: weights 3 and 1, 16 / 10 of 2. Nothing lies between.
    log_weights = torch.tensor([3.0, 7.0, 1.0, 7.0]).log()
    ratios = ess_ratio_by_age(log_weights, torch.tensor([30, 0, 40, 0]), (1, 10))
    assert ratios["0-1"] == pytest.approx(1.0)
    assert math.isnan(ratios["1-10"])
    assert ratios["10-inf"] == pytest.approx(0.8)


def test_a_trajectory_weighs_the_product_of_its_tokens():
    log_ratios = torch.tensor([2.0, 3.0, 5.0, 7.0]).log()
    weights = sequence_log_weights(log_ratios, torch.tensor([1, 0, 1, 3]), 4)
    torch.testing.assert_close(weights.exp(), torch.tensor([3.0, 10.0, 1.0, 7.0], dtype=torch.float64))


@given(st.lists(st.lists(st.floats(-1e4, 1e4), max_size=6), min_size=1, max_size=5).filter(any))
def test_moments_of_parts_give_the_effective_size_of_the_whole(parts):
    pooled = pooled_moments(torch.stack([weight_moments(torch.tensor(part, dtype=torch.float64)) for part in parts]))
    whole = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    assert float(pooled[2]) == len(whole)
    assert ess_of_moments(pooled) == pytest.approx(effective_sample_size(whole), rel=1e-6)
