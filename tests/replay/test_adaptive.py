"""Adaptive tau on synthetic policies whose drift is known, and what the estimate must not depend on."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.algorithms.ess import ess_ratio
from freshper_lightning.replay import AbsoluteReward, AdaptiveTau, ExponentialDecay, HeldOut, LogRatios, ReplayBuffer
from freshper_lightning.replay.adaptive import fit_drift, variance_by_age
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_trajectory

RATE = 0.02
UPDATES, TOKENS = 4, 16


class DriftingPolicy:
    """Every update moves the log-ratio of a token of a trajectory by a Gaussian step, of variance ``RATE`` on average.

    What is worth more drifts faster: a trajectory of base ``b`` has the rate ``RATE x b``, and bases average to 1.
    Means are those of the whole population, so that its variance is ``RATE x age`` and no more.
    """

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def collect(self, count, iteration):
        rewards = self.random.choice([0.4, 0.9, 1.7], size=count)
        return [
            make_trajectory((float(reward),), (TOKENS,), group=iteration * count + member, member=member)
            for member, reward in enumerate(rewards)
        ]

    def log_ratios(self, trajectories, ages, weights=None, rate=RATE):
        bases = np.array([item.episode_return for item in trajectories])
        variances = np.repeat(rate * np.asarray(ages), TOKENS)
        values = self.random.normal(-variances / 2, np.sqrt(variances * np.repeat(bases, TOKENS)))
        return LogRatios.of_tokens(values, np.repeat(np.arange(len(ages)), TOKENS), ages, weights)


def closed_loop(alpha, start, level, rate, iterations=40, held_out=16, seed=0, bounds=(1e-3, 1e6)):
    """Collect, hold out, draw by priority and age, look, fit, set tau; every draw and every entry is a real one."""
    policy, visited = DriftingPolicy(seed), set()
    buffer = ReplayBuffer(5000, AbsoluteReward(eps=0.0), ExponentialDecay(start), alpha=alpha, seed=seed)
    apart, estimator = HeldOut(400, "updates", seed), AdaptiveTau(level, bounds=bounds, window=2048)
    taus = []
    for iteration in range(1, iterations + 1):
        now = ClockReading(updates=(iteration - 1) * UPDATES, iteration=iteration)
        buffer.add(apart.take(policy.collect(72, iteration), held_out, now), now)
        items, ages = apart.probe(64, now)
        estimator.observe(policy.log_ratios(items, ages, rate=rate))
        buffer.decay = ExponentialDecay(estimator.next_tau(buffer.decay.tau, alpha))
        taus.append(buffer.decay.tau)
        for update in range(UPDATES):
            draw = buffer.sample(2, ClockReading(updates=now.updates + update, iteration=iteration), 0.4)
            new = [place for place, key in enumerate(draw.ids) if key not in visited and draw.ages[place] > 0]
            visited.update(draw.ids.tolist())
            weights = buffer.bases(draw.ids[new]) ** -alpha
            estimator.observe_drawn(
                policy.log_ratios([draw.trajectories[i] for i in new], draw.ages[new], weights, rate=rate)
            )
    return taus


@pytest.mark.parametrize("alpha", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("wrong_by", [0.1, 10.0])
def test_tau_finds_a_rate_that_nobody_told_it(alpha, wrong_by):
    """Mean bases are 1, so that tokens of the whole population have the variance RATE x age."""
    target = alpha / RATE
    taus = closed_loop(alpha, wrong_by * target, "token", RATE)
    assert taus[0] == pytest.approx(wrong_by * target), "no age above 0 has been seen in the first iteration"
    for tau in taus[-10:]:
        assert tau == pytest.approx(target, rel=0.1)


@pytest.mark.parametrize("wrong_by", [0.1, 10.0])
def test_at_the_level_of_sequences_the_rate_is_that_of_the_sum_over_tokens(wrong_by):
    target = 0.6 / RATE
    taus = closed_loop(0.6, wrong_by * target, "sequence", RATE / TOKENS, iterations=60)
    assert np.mean(taus[-10:]) == pytest.approx(target, rel=0.1)


def test_tau_moves_by_a_factor_of_at_most_two_and_stays_in_its_bounds():
    taus = closed_loop(0.6, 3000.0, "token", RATE, iterations=12, bounds=(40.0, 4000.0))
    steps = [later / earlier for earlier, later in pairwise(taus)]
    assert min(steps) >= 0.5
    assert taus[2:6] == [taus[1] / 2, taus[1] / 4, taus[1] / 8, taus[1] / 16]
    assert taus[-1] == 40.0, "alpha x tau_hat is 30"


def drawn_once(alpha, count=4000, seed=1):
    """Log-ratios at age 10 of what a buffer draws by priority, weighted by ``base**-alpha`` and not."""
    policy = DriftingPolicy(seed)
    buffer = ReplayBuffer(count, AbsoluteReward(eps=0.0), ExponentialDecay(50.0), alpha=alpha)
    buffer.add(policy.collect(count, 0), ClockReading())
    draw = buffer.sample(2000, ClockReading(updates=10), 0.0)
    ratios = policy.log_ratios(draw.trajectories, draw.ages, buffer.bases(draw.ids) ** -alpha)
    return ratios, LogRatios(np.where(np.arange(5) == 1, 1.0, ratios.rows))


def test_what_is_drawn_by_priority_is_weighted_back_to_the_whole_population():
    weighted, plain = (
        variance_by_age([ratios], "token").variances[0] / (10 * RATE) for ratios in drawn_once(alpha=1.0)
    )
    assert weighted == pytest.approx(1.0, rel=0.05)
    assert plain > 1.2, "the test is of no use if priorities do not bias the draw"


def gaussian(rate, ages, power=1, birth=0.0, tokens=8, seed=0):
    """Token log-ratios of variance ``birth + rate x age**power``."""
    ages = np.asarray(ages, np.float64)
    variances = np.repeat(birth + rate * ages**power, tokens)
    values = np.random.default_rng(seed).normal(-variances / 2, np.sqrt(variances))
    return LogRatios.of_tokens(values, np.repeat(np.arange(len(ages)), tokens), ages)


def fits_of(ratios, level="token"):
    estimator = AdaptiveTau(window=len(ratios))
    estimator.observe(ratios)
    return estimator.fits(level)


@pytest.mark.parametrize(("power", "better"), [(1, "linear"), (2, "quadratic")])
def test_the_fit_that_made_the_data_fits_better(power, better):
    fits = fits_of(gaussian(0.01, np.tile(np.arange(1, 41), 20), power))
    assert (fits.quadratic_gain() > 0) == (better == "quadratic")
    assert abs(fits.quadratic_gain()) > 10
    assert fits.of(better).tau_hat() == pytest.approx(0.01 ** (-1 / power), rel=0.05)


def test_tau_hat_is_the_age_at_which_s2_is_one():
    for growth in ("linear", "quadratic"):
        fit = fit_drift(variance_by_age([gaussian(0.03, np.tile(np.arange(1, 30), 8))], "token"), growth)
        assert fit.rate * fit.tau_hat() ** fit.power == pytest.approx(1.0)


def test_engines_that_round_differently_do_not_pass_for_drift():
    """The variance at age 0 is common to all ages, and cancels in the share of draws."""
    ages = np.tile(np.arange(0, 40), 40)
    fits = fits_of(gaussian(1e-3, ages, birth=5e-3))
    assert fits.at_birth == pytest.approx(5e-3, rel=0.2)
    assert fits.linear.tau_hat() == pytest.approx(1000.0, rel=0.1)


def test_the_plug_in_effective_sample_size_saturates_where_the_variance_does_not():
    """32 trajectories at each age: minus the log of ESS/n cannot exceed log 32, so that old ages seem not to drift."""
    ages = np.repeat(np.array([50.0, 100.0, 200.0, 400.0]), 32)
    ratios = gaussian(0.5, ages, tokens=1)
    sums = torch.from_numpy(ratios.rows[:, 3]).reshape(4, 32)
    plug_in = np.array([-math.log(ess_ratio(one)) for one in sums])
    assert (plug_in <= math.log(32)).all()
    assert plug_in[-1] / 400 < 0.5 / 20, "a fit to it would call the drift twenty times slower than it is"
    assert fits_of(ratios, "sequence").linear.rate == pytest.approx(0.5, rel=0.25)


def test_log_ratios_are_not_clipped():
    """Trajectories of s2 = 400: a clip at 20 nats would cut a third of them."""
    fits = fits_of(gaussian(1.0, np.repeat([200.0, 400.0], 400), tokens=1), "sequence")
    assert fits.linear.rate == pytest.approx(1.0, rel=0.1)


def test_a_policy_that_does_not_move_has_an_infinite_tau_hat_and_takes_tau_to_its_bound():
    estimator = AdaptiveTau(bounds=(1.0, 70.0))
    estimator.observe(gaussian(0.0, np.tile(np.arange(10), 4)))
    assert estimator.fits("token").linear.tau_hat() == math.inf
    assert estimator.fits("sequence").quadratic.tau_hat() == math.inf
    assert estimator.fits("token").quadratic_gain() == 0.0
    assert estimator.next_tau(50.0, 0.6) == 70.0


def test_too_few_observations_leave_tau_alone():
    estimator = AdaptiveTau()
    assert estimator.next_tau(50.0, 0.6) == 50.0
    estimator.observe(gaussian(0.1, [0.0] * 100))
    assert estimator.fits("token") is None, "nothing is known of ages above 0"
    estimator.observe(gaussian(0.1, [5.0] * 7))
    assert estimator.next_tau(50.0, 0.6) == 50.0
    estimator.observe(gaussian(0.1, [5.0]))
    assert estimator.next_tau(50.0, 0.6) == 25.0


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 10.0), st.integers(1, 5)), min_size=12, max_size=40),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_the_unit_of_age_and_the_scale_of_weights_do_not_matter(rows, scale, seed):
    """Ages in other units give tau_hat in other units, whichever clock they come from."""
    ages, weights, tokens = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    which = np.repeat(np.arange(len(ages)), tokens.astype(int))
    values = np.random.default_rng(seed).normal(0, np.sqrt(0.1 * ages[which]))
    one = fits_of(LogRatios.of_tokens(values, which, ages, weights))
    other = fits_of(LogRatios.of_tokens(values, which, scale * ages, scale * weights))
    if one is None:
        assert other is None
        return
    for growth in ("linear", "quadratic"):
        expected = scale * one.of(growth).tau_hat()
        assert other.of(growth).tau_hat() == pytest.approx(expected, rel=1e-3)


def test_one_age_beside_that_of_birth_is_enough_to_follow():
    """The second probe of every run has these ages, whatever number of updates an iteration has."""
    for updates in range(1, 201):
        ratios = gaussian(0.02, np.repeat([0.0, updates], 50), birth=0.1)
        buckets = variance_by_age([ratios], "token")
        assert buckets.powers[0] == pytest.approx([updates])
        assert buckets.at_birth == pytest.approx(0.1, rel=0.3)
        estimator = AdaptiveTau()
        estimator.observe(ratios)
        assert 25.0 <= estimator.next_tau(50.0, 0.6) <= 100.0


@given(low=st.floats(1e-8, 1e8), steps=st.lists(st.integers(0, 20), min_size=8, max_size=40))
def test_ages_that_differ_by_rounding_errors_are_above_zero_and_counted_once(low, steps):
    """Sums of learning rates or drift reach one age on several ways."""
    ages = np.array([low + step * np.spacing(low) for step in steps])
    apart = variance_by_age([gaussian(1.0, np.concatenate([np.zeros(8), ages]), tokens=2)], "token")
    assert apart.at_birth == 0.0, "log-ratios at birth are all 0"
    assert apart.sizes.sum() <= len(ages)
    together = [float(np.sum(steps == step)) for step in set(steps)]
    assert apart.sizes.sum() >= sum(count for count in together if count >= 3)


def test_the_window_forgets_how_fast_the_policy_once_moved():
    estimator = AdaptiveTau(window=200)
    estimator.observe(gaussian(0.5, np.tile(np.arange(1, 21), 10)))
    estimator.observe(gaussian(0.01, np.tile(np.arange(1, 21), 10), seed=1))
    assert estimator.fits("token").linear.tau_hat() == pytest.approx(100.0, rel=0.15)


def test_the_state_gives_the_same_estimate_to_the_bit():
    one, other = AdaptiveTau(window=50), AdaptiveTau(window=50)
    one.observe(gaussian(0.1, np.arange(1.0, 40.0)))
    one.observe_drawn(gaussian(0.1, np.arange(1.0, 80.0), seed=2))
    other.load_state_dict(one.state_dict())
    for part in (one, other):
        part.observe(gaussian(0.2, np.arange(1.0, 30.0), seed=3))
    assert one.fits("token") == other.fits("token")
    assert one.next_tau(7.0, 0.6) == other.next_tau(7.0, 0.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "turn"}, r"level must be one of token, sequence, not 'turn'"),
        ({"growth": "cubic"}, r"growth must be one of linear, quadratic, not 'cubic'"),
        ({"bounds": (0.0, 5.0)}, r"bounds must be two numbers, finite, above 0 and in order, not \(0\.0, 5\.0\)"),
        ({"bounds": (6.0, 5.0)}, r"bounds must be .* in order"),
        ({"bounds": (1.0, math.inf)}, r"bounds must be .*finite"),
        ({"bounds": (1.0, math.nan)}, r"bounds must be .*finite"),
        ({"bounds": (1.0, 2.0, 3.0)}, r"bounds must be two numbers, .*not \(1\.0, 2\.0, 3\.0\)"),
        ({"window": 0}, r"window must be at least 1, not 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveTau(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"log_ratios": [0.1, -math.inf]},
            r"log_ratios must be finite: a token has lost its probability, not \[-inf\]",
        ),
        ({"log_ratios": [math.nan, 0.1]}, r"log_ratios must be finite.*not \[nan\]"),
        ({"ages": [1.0, math.nan]}, r"ages must be finite and at least 0, not \[nan\]"),
        ({"ages": [-2.0, 1.0]}, r"ages must be finite and at least 0, not \[-2\.0\]"),
        ({"weights": [0.0, 1.0]}, r"weights must be finite and above 0, not \[0\.0\]"),
        ({"weights": [1.0, math.inf]}, r"weights must be finite and above 0, not \[inf\]"),
    ],
)
def test_what_no_variance_can_be_taken_of_is_refused(arguments, message):
    """One such value would make every later fit, and so tau, no number."""
    with pytest.raises(ValueError, match=message):
        LogRatios.of_tokens(**({"log_ratios": [0.1, 0.2], "segments": [0, 1], "ages": [1.0, 2.0]} | arguments))


@pytest.mark.parametrize(
    ("tau", "alpha", "message"),
    [
        (5.0, 0.0, r"alpha must be above 0 and at most 1, not 0\.0"),
        (5.0, math.nan, r"alpha must be .*not nan"),
        (math.nan, 0.6, r"tau must be finite and above 0, not nan"),
        (math.inf, 0.6, r"tau must be .*not inf"),
    ],
)
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_tau_does_not_follow_what_is_no_number(tau, alpha, message, rate):
    """Without drift tau_hat is infinite, and 0 times that is no number."""
    estimator = AdaptiveTau()
    estimator.observe(gaussian(rate, np.tile(np.arange(10), 4)))
    with pytest.raises(ValueError, match=message):
        estimator.next_tau(tau, alpha)


def held_out_of(iterations, capacity=100, count=3, seed=0):
    apart = HeldOut(capacity, "updates", seed)
    for iteration in range(1, iterations + 1):
        items = [make_trajectory(group=iteration, member=member) for member in range(10)]
        rest = apart.take(items, count, ClockReading(updates=6 * iteration, iteration=iteration))
        assert [item.member for item in rest] == sorted(item.member for item in rest)
        assert len(rest) == 10 - count
    return apart


def test_held_out_trajectories_are_probed_evenly_over_age():
    apart = held_out_of(8)
    assert len(apart) == 24
    items, ages = apart.probe(8, ClockReading(updates=60, iteration=10))
    assert ages.tolist() == [60.0 - 6 * iteration for iteration in range(1, 9)]
    assert [item.group for item in items] == list(range(1, 9))
    everything, _ = apart.probe(99, ClockReading(updates=60, iteration=10))
    assert len({(item.group, item.member) for item in everything}) == 24


def test_what_is_held_out_is_a_function_of_seed_and_iteration_and_even_over_members():
    def members(seed):
        items, _ = held_out_of(60, capacity=1000, seed=seed).probe(1000, ClockReading(updates=999, iteration=99))
        return [item.member for item in items]

    assert members(1) == members(1)
    assert members(1) != members(2)
    counts = np.bincount(members(3), minlength=10)
    assert counts.min() > 180 / 10 - 12
    assert counts.max() < 180 / 10 + 12


def test_the_oldest_go_when_too_many_are_held_out():
    apart = held_out_of(5, capacity=6)
    items, _ = apart.probe(6, ClockReading(updates=60, iteration=10))
    assert [item.group for item in items] == [4, 4, 4, 5, 5, 5]
    loaded = HeldOut(6, "updates")
    loaded.load_state_dict(apart.state_dict())
    assert len(loaded) == 6
    assert [item.group for item in loaded.probe(6, ClockReading(updates=60, iteration=10))[0]] == [4, 4, 4, 5, 5, 5]
