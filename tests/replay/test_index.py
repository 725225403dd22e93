import time
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay import ExponentialDecay, NoDecay
from freshper_lightning.replay.columns import Columns
from freshper_lightning.replay.index import Snapshot, SnapshotKey, importance_weights, stratified

EXACT = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN)


def exact_probabilities(entries, now, alpha, tau):
    """Probabilities of (base, log fresh, since) in 50 digits; ``tau`` None for no decay."""
    powers = []
    for base, log_fresh, since in entries:
        if base == 0:
            powers.append(Decimal(0))
            continue
        age = Decimal(now) - Decimal(since)
        log_decay = -EXACT.divide(age, Decimal(tau)) if tau is not None else Decimal(0)
        log_priority = EXACT.add(EXACT.add(EXACT.ln(Decimal(base)), Decimal(log_fresh)), log_decay)
        powers.append(EXACT.exp(EXACT.multiply(Decimal(alpha), log_priority)))
    total = reduce(EXACT.add, powers)
    return [EXACT.divide(power, total) if total else Decimal(0) for power in powers]


def assert_exact(probabilities, expected):
    """Relative 1e-12 above 1e-290, and 0 below."""
    for got, true in zip(probabilities.tolist(), expected, strict=True):
        if true > Decimal("1.000001e-290"):
            assert abs(EXACT.divide(EXACT.subtract(Decimal(got), true), true)) <= Decimal("1e-12"), (got, true)
        elif true < Decimal("0.999999e-290"):
            assert got == 0


def snapshot_of(entries, now, alpha, tau):
    base, log_fresh, since = (np.array(column, np.float64) for column in zip(*entries, strict=True))
    columns = Columns.empty().followed_by(np.arange(len(base)), base, 0.0)
    rows = np.arange(len(base))
    columns = Columns(columns.ids, columns.log_base, log_fresh[rows], since)
    return Snapshot.build(SnapshotKey(columns, now, alpha, NoDecay() if tau is None else ExponentialDecay(tau)))


bases = st.just(0.0) | st.floats(1e-300, 1e300) | st.floats(0.01, 10) | st.floats(-300, 300).map(lambda x: 10**x)
freshness = st.just(0.0) | st.floats(-1000, 0)
ages = st.integers(0, 1000) | st.integers(0, 10**9)
alphas = st.sampled_from([0.0, 0.3, 0.6, 1.0]) | st.floats(0, 1)
taus = st.none() | st.floats(1e-3, 1e9) | st.sampled_from([1.0, 50.0])


@given(st.lists(st.tuples(bases, freshness, ages), min_size=1, max_size=8), st.integers(0, 10**9), alphas, taus)
def test_probabilities_equal_the_formula_in_fifty_digits(entries, later, alpha, tau):
    entries = [(base, log_fresh, 10**9 - age) for base, log_fresh, age in entries]
    now = 10**9 + later
    assert_exact(snapshot_of(entries, now, alpha, tau).probabilities(), exact_probabilities(entries, now, alpha, tau))


def test_an_age_common_to_all_entries_costs_no_precision():
    entries = [(1.0, 0.0, age) for age in range(100)]
    young, old = (snapshot_of(entries, now, 0.6, 3.7).probabilities() for now in (100, 10**9))
    assert young.tobytes() == old.tobytes()
    assert_exact(old, exact_probabilities(entries, 10**9, 0.6, 3.7))


def test_a_young_entry_without_mass_does_not_hide_old_ones():
    entries = [(2.0, 0.0, 0), (1.0, 0.0, 1), (0.0, 0.0, 10**9), (1.0, -np.inf, 10**9)]
    now, tau = 10**9, 3.7
    expected = exact_probabilities(entries[:3], now, 1.0, tau)
    assert_exact(snapshot_of(entries, now, 1.0, tau).probabilities()[:3], expected)


def test_a_freshness_common_to_all_entries_costs_no_precision():
    entries = [(base, -1e6, 0) for base in (0.3, 0.7, 1e-3)]
    assert_exact(snapshot_of(entries, 0, 1.0, None).probabilities(), exact_probabilities(entries, 0, 1.0, None))


def test_alpha_is_applied_once():
    probabilities = snapshot_of([(1.0, 0.0, 0), (16.0, 0.0, 0)], 0, 0.5, None).probabilities()
    assert probabilities == pytest.approx([1 / 5, 4 / 5], rel=1e-15)


def test_alpha_zero_is_uniform_over_entries_with_a_priority():
    probabilities = snapshot_of([(1e-300, 0.0, 0), (0.0, 0.0, 0), (1e300, -5.0, 9)], 9, 0.0, 1.0).probabilities()
    assert probabilities.tolist() == [0.5, 0, 0.5]


def test_freshness_of_minus_infinity_is_probability_zero():
    probabilities = snapshot_of([(1.0, -np.inf, 5), (1.0, 0.0, 0)], 5, 0.6, 1.0).probabilities()
    assert probabilities.tolist() == [0, 1]


def test_without_mass_all_probabilities_are_zero():
    snapshot = snapshot_of([(0.0, 0.0, 0), (1.0, -np.inf, 0)], 1, 0.6, 1.0)
    assert (snapshot.total, snapshot.probabilities().tolist()) == (0, [0, 0])


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shape"):
        Columns(np.arange(2), np.zeros(2), np.zeros(1), np.zeros(2))


def test_columns_cannot_be_written():
    columns = Columns.empty().followed_by(np.arange(2), np.ones(2), 0.0)
    with pytest.raises(ValueError, match="read-only"):
        columns.log_base[0] = 1.0


masses = st.lists(st.just(0.0) | st.floats(1e-12, 1) | st.floats(1, 1e3), min_size=1, max_size=30).filter(any)


@given(masses, st.integers(1, 64), st.integers(0, 2**32))
def test_a_stratified_count_is_within_two_of_its_expectation(weights, n, seed):
    weights = np.array(weights)
    rows = stratified(np.cumsum(weights), np.random.default_rng(seed).random(n))
    counts = np.bincount(rows, minlength=len(weights))
    assert len(counts) == len(weights)
    assert (np.abs(counts - n * weights / weights.sum()) < 2).all()
    assert (counts[weights == 0] == 0).all()


def test_each_slice_of_the_mass_is_hit_exactly_once():
    rows = stratified(np.cumsum(np.full(40, 0.25)), np.random.default_rng(0).random(10))
    assert (rows // 4).tolist() == list(range(10))


def test_each_slice_has_a_uniform_of_its_own():
    assert stratified(np.arange(1.0, 21.0), np.array([0.15, 0.95])).tolist() == [1, 19]


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_range_hit_entries_with_mass_only(uniform):
    cumulative = np.cumsum([0.0, 0.1, 0.0, 0.7, 0.0, 0.0])
    assert set(stratified(cumulative, np.full(7, uniform)).tolist()) <= {1, 3}
    assert stratified(cumulative, np.full(1, uniform))[0] == (1 if uniform == 0 else 3)


def test_stratified_draws_are_unbiased():
    weights = np.array([0.05, 3.0, 0.0, 1.0, 0.4, 1.3, 0.001])
    batches, n, rng = 10_000, 5, np.random.default_rng(3)
    counts = sum(np.bincount(stratified(np.cumsum(weights), rng.random(n)), minlength=7) for _ in range(batches))
    expected = batches * n * weights / weights.sum()
    # The variance of a count in one batch is at most 1/2, from its two ends.
    assert (np.abs(counts - expected) <= 5 * np.sqrt(batches * np.minimum(0.5, expected / batches))).all()


def test_importance_weights_by_hand():
    # N = 4: (4 x .5)^-.5 = .7071, (4 x .125)^-.5 = 1.4142; over the maximum .5 and 1.
    assert importance_weights(np.array([0.5, 0.125, 0.5]), 0.5) == pytest.approx([0.5, 1.0, 0.5], rel=1e-15)


@given(st.lists(st.floats(1e-290, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_the_rarest_entry_of_a_draw_has_weight_one(probabilities, beta):
    weights = importance_weights(np.array(probabilities), beta)
    assert weights[np.argmin(probabilities)] == 1
    assert ((weights > 0) & (weights <= 1)).all()
    size = len(probabilities)
    direct = (size * np.array(probabilities)) ** -beta
    assert weights == pytest.approx(direct / direct.max(), rel=1e-12)


def test_drawing_128_of_50_000_takes_milliseconds():
    rng = np.random.default_rng(0)
    columns = Columns.empty().followed_by(np.arange(50_000), rng.random(50_000), 0.0)
    times = []
    for now in range(20):
        start = time.process_time()
        snapshot = Snapshot.build(SnapshotKey(columns, now, 0.6, ExponentialDecay(50)))
        importance_weights(snapshot.probabilities_of(snapshot.draw(rng.random(128))), 0.4)
        times.append(time.process_time() - start)
    assert min(times) < 4e-3  # measured below 1 ms; the margin is for shared machines
