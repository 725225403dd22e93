import numpy as np

from freshper_lightning.study.bootstrap import counts, estimate, resamples


def test_every_sample_has_as_many_groups_as_there_are_and_depends_on_the_seed_alone():
    samples = resamples(5, 100, seed=1)
    assert samples.shape == (100, 5)
    assert (counts(samples).sum(1) == 5).all()
    assert (samples == resamples(5, 100, seed=1)).all()
    assert (samples != resamples(5, 100, seed=2)).any()


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    values = np.random.default_rng(0).normal(size=400)
    found = estimate(values.mean(), values[resamples(400, 4000, seed=0)].mean(1))
    assert np.isclose(found.high - found.low, 2 * 1.96 / 20, rtol=0.1)
    assert found.low < found.value < found.high


def test_replicates_that_are_no_number_take_no_part():
    assert estimate(1.0, np.array([np.nan, 2.0, 2.0])).low == 2.0
    assert np.isnan(estimate(1.0, np.array([np.nan])).high)
