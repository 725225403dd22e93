import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay import ExponentialDecay, InverseDecay, NoDecay, WindowDecay
from freshper_lightning.replay.columns import Columns
from freshper_lightning.replay.masses import HIGHEST_TOTAL, LOWEST_TOTAL, StaticMasses, Version
from tests.replay.model import assert_exact, exact_probabilities, exponential, inverse, no_decay, window


def masses_of(entries, now, alpha, decay):
    base, log_fresh, since = (np.array(column, np.float64) for column in zip(*entries, strict=True))
    columns, count = Columns(), len(base)
    columns.append(np.arange(count), np.arange(count), np.zeros(count, np.int64), base, 0.0)
    columns.log_fresh[:count], columns.since[:count] = log_fresh, since
    static = StaticMasses(columns, Version())
    static.adjust(alpha, decay)
    return static.at(float(now), lambda moment: None)


def probabilities_of(entries, now, alpha, decay):
    masses = masses_of(entries, now, alpha, decay)
    found = masses.of(np.arange(len(entries)))
    return found / masses.total if masses.total > 0 else found


def test_probabilities_are_exact_where_the_youngest_entry_is_the_least_fresh_by_far():
    late = 10**9 + 7
    entries = [(1.0, 0.0, 0), (1.0, 0.0, 1), (1.0, -3e7, late)]
    found = probabilities_of(entries, late, 1.0, ExponentialDecay(tau=50.7))
    assert_exact(found, exact_probabilities(entries, late, 1.0, exponential(50.7)))


bases = st.just(0.0) | st.floats(1e-300, 1e300) | st.floats(0.01, 10) | st.floats(-300, 300).map(lambda x: 10**x)
freshness = st.just(0.0) | st.floats(-1000, 0) | st.just(-np.inf)
ages = st.integers(0, 1000) | st.integers(0, 10**9)
alphas = st.sampled_from([0.0, 0.3, 0.6, 1.0]) | st.floats(0, 1)
taus = st.floats(1e-3, 1e9) | st.sampled_from([1.0, 50.0])
decays = (
    st.just((NoDecay(), no_decay))
    | st.just((InverseDecay(), inverse))
    | taus.map(lambda tau: (ExponentialDecay(tau), exponential(tau)))
    | st.floats(0, 1e9).map(lambda age: (WindowDecay(age), window(age)))
)
entries_at = st.lists(st.tuples(bases, freshness, ages), min_size=1, max_size=8)


@given(entries_at, st.integers(0, 10**9), alphas, decays)
def test_probabilities_equal_the_formula_in_fifty_digits(entries, later, alpha, decay):
    entries = [(base, log_fresh, 10**9 - age) for base, log_fresh, age in entries]
    now = 10**9 + later
    expected = exact_probabilities(entries, now, alpha, decay[1])
    assert_exact(probabilities_of(entries, now, alpha, decay[0]), expected)


def test_a_decay_that_inherits_from_none_at_all_still_decays():
    class Halving(NoDecay):
        def log_factor(self, age):
            return -age * np.log(2)

    assert probabilities_of([(1.0, 0.0, 0), (1.0, 0.0, 1)], 1, 1.0, Halving()) == pytest.approx([1 / 3, 2 / 3])


def test_an_age_common_to_all_entries_costs_no_precision():
    entries = [(1.0, 0.0, age) for age in range(100)]
    young, old = (probabilities_of(entries, now, 0.6, ExponentialDecay(3.7)) for now in (100, 10**9))
    assert young.tobytes() == old.tobytes()
    assert_exact(old, exact_probabilities(entries, 10**9, 0.6, exponential(3.7)))


def test_a_young_entry_without_mass_does_not_hide_old_ones():
    entries = [(2.0, 0.0, 0), (1.0, 0.0, 1), (0.0, 0.0, 10**9), (1.0, -np.inf, 10**9)]
    expected = exact_probabilities(entries, 10**9, 1.0, exponential(3.7))
    assert_exact(probabilities_of(entries, 10**9, 1.0, ExponentialDecay(3.7)), expected)


def test_a_freshness_common_to_all_entries_costs_no_precision():
    entries = [(base, -1e6, 0) for base in (0.3, 0.7, 1e-3)]
    assert_exact(probabilities_of(entries, 0, 1.0, NoDecay()), exact_probabilities(entries, 0, 1.0, no_decay))


def test_entries_that_were_negligible_come_back_when_those_of_greatest_worth_have_left_the_window():
    entries = [(1e300, 0.0, 0), (1e-200, 0.0, 50), (2e-200, 0.0, 50)]
    assert probabilities_of(entries, 50, 1.0, WindowDecay(60)).tolist() == [1, 0, 0]
    assert probabilities_of(entries, 100, 1.0, WindowDecay(60)) == pytest.approx([0, 1 / 3, 2 / 3], rel=1e-12)
    assert probabilities_of(entries, 200, 1.0, WindowDecay(60)).tolist() == [0, 0, 0]


def test_alpha_is_applied_once():
    probabilities = probabilities_of([(1.0, 0.0, 0), (16.0, 0.0, 0)], 0, 0.5, NoDecay())
    assert probabilities == pytest.approx([1 / 5, 4 / 5], rel=1e-15)


def test_alpha_zero_is_uniform_over_entries_with_a_priority():
    entries = [(1e-300, 0.0, 0), (0.0, 0.0, 0), (1e300, -5.0, 9)]
    assert probabilities_of(entries, 9, 0.0, ExponentialDecay(1.0)).tolist() == [0.5, 0, 0.5]
    assert probabilities_of(entries, 9, 0.0, WindowDecay(3)).tolist() == [0, 0, 1]


def test_without_mass_all_probabilities_are_zero():
    masses = masses_of([(0.0, 0.0, 0), (1.0, -np.inf, 0)], 1, 0.6, ExponentialDecay(1.0))
    assert (masses.total, masses.of(np.arange(2)).tolist()) == (0, [0, 0])


@given(st.data())
def test_masses_are_equal_to_the_bit_whether_rows_change_one_by_one_or_all_at_once(data):
    """At one scale; and the scale is renewed before anything leaves the range in which it is exact."""
    columns, alpha, decay = Columns(), data.draw(st.sampled_from([0.6, 1.0])), ExponentialDecay(5.0)
    static = StaticMasses(columns, Version())
    static.adjust(alpha, decay)
    now = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        now += data.draw(st.integers(0, 100))
        count = data.draw(st.integers(1, 150))
        base = np.array(data.draw(st.lists(st.floats(1e-9, 1e3), min_size=3, max_size=3)))[np.arange(count) % 3]
        rows = columns.append(columns.end + np.arange(count), np.arange(count), np.zeros(count, np.int64), base, now)
        static.rows_changed(rows)
        gone = columns.live_rows()[:: data.draw(st.integers(2, 9))]
        columns.remove(gone)
        static.rows_changed(gone)
        assert LOWEST_TOTAL <= static.sums.total <= HIGHEST_TOTAL or len(columns) == 0
        other = StaticMasses(columns, Version())
        other.adjust(alpha, decay)
        other.all_changed(static.scale)
        end = columns.end
        assert other.sums.masses[:end].tobytes() == static.sums.masses[:end].tobytes()
        assert other.sums.total == static.sums.total
