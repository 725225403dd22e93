"""Against values worked out by hand, and distributions whose truth is known."""

from itertools import product

import numpy as np
import pytest

from freshper_lightning.compare.statistics import estimate, interquartile_mean, intervals, paired, sign_test

MEASURED_COVERAGE = {3: 0.75, 4: 0.87, 5: 0.90, 10: 0.93}
"""docs/results.md: share of 95 % intervals that held the truth, for normal data; 4,000 samples of each size."""


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, -50])) == 2
    assert interquartile_mean(np.array([9.0, 1, 2, 4])) == 3
    assert interquartile_mean(np.array([6.0, 1, 2])) == 3
    assert interquartile_mean(np.arange(8.0)) == 3.5
    np.testing.assert_array_equal(interquartile_mean(np.array([[1.0, 10], [3, 30], [2, 20]]), axis=0), [2, 20])


def test_the_interval_of_three_seeds_is_that_of_all_their_resamples():
    values = np.array([0.0, 0.3, 0.9])
    everything = np.sort([np.mean(sample) for sample in product(values, repeat=3)])
    found = estimate(values)
    assert found.value == pytest.approx(0.4)
    low, high = np.quantile(everything, [0.025, 0.975], method="inverted_cdf")
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.runs == 3


def test_one_seed_has_no_interval_and_equal_seeds_have_one_of_no_width():
    alone = estimate(np.array([0.4]))
    assert (alone.value, alone.low, alone.high, alone.runs) == (0.4, None, None, 1)
    equal = estimate(np.full(4, 0.4))
    assert (equal.low, equal.high) == (pytest.approx(0.4), pytest.approx(0.4))
    with pytest.raises(ValueError, match="at least one seed"):
        estimate(np.empty(0))


def test_intervals_of_several_places_are_those_of_each():
    values = np.random.default_rng(0).normal(size=(5, 3))
    low, high = intervals(values)
    for place in range(3):
        found = estimate(values[:, place])
        assert (low[place], high[place]) == (pytest.approx(found.low, abs=0.1), pytest.approx(found.high, abs=0.1))


def test_differences_are_paired_by_seed():
    arm, baseline = {0: 0.5, 1: 0.9, 2: 0.2, 7: 1.0}, {0: 0.4, 1: 0.8, 2: 0.3, 9: 0.0}
    found = paired(arm, baseline)
    assert found.estimate.value == pytest.approx((0.1 + 0.1 - 0.1) / 3)
    assert (found.above, found.below, found.estimate.runs) == (2, 1, 3)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_what_all_seeds_share_is_not_in_the_interval_of_a_paired_difference():
    seeds = dict(enumerate(np.random.default_rng(1).normal(size=5)))
    found = paired({seed: value + 0.25 for seed, value in seeds.items()}, seeds).estimate
    assert (found.low, found.high) == (pytest.approx(0.25), pytest.approx(0.25))


def test_the_sign_test_of_few_seeds():
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(3, 0) == pytest.approx(2 / 8)
    assert sign_test(2, 2) == 1
    assert sign_test(0, 0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("runs", MEASURED_COVERAGE)
def test_intervals_cover_the_truth_as_often_as_the_page_says(runs):
    samples = np.random.default_rng(runs).normal(size=(runs, 3000))
    low, high = intervals(samples)
    coverage = float(np.mean((low <= 0) & (high >= 0)))
    assert coverage == pytest.approx(MEASURED_COVERAGE[runs], abs=0.03)


@pytest.mark.slow
def test_the_interval_of_many_seeds_covers_the_truth_nineteen_times_of_twenty():
    low, high = intervals(np.random.default_rng(0).normal(size=(100, 1000)))
    assert np.mean((low <= 0) & (high >= 0)) == pytest.approx(0.95, abs=0.02)
