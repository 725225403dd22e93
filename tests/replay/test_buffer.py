from copy import deepcopy

import numpy as np
import pytest
import torch

from freshper_lightning.replay import (
    AbsoluteAdvantage,
    AbsoluteReward,
    ExponentialDecay,
    NothingToDraw,
    Priority,
    TDError,
)
from freshper_lightning.replay.content import ROW_BYTES
from freshper_lightning.replay.images import image_nbytes
from freshper_lightning.replay.storage import TrajectoryStore
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import START, assert_same, assert_same_draw, make_buffer, make_trajectory, of_rewards


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("capacity", 0, "at least 1"),
        ("capacity", 2.5, "an integer"),
        ("capacity", float("inf"), "an integer"),
        ("capacity", True, "an integer"),
        ("max_bytes", 1e9, "an integer"),
        ("seed", 0.5, "an integer"),
        ("decay", "exponential", "a Decay"),
        ("alpha", -0.1, r"in \[0, 1\]"),
        ("alpha", float("nan"), r"in \[0, 1\]"),
        ("seed", -1, "at least 0"),
        ("max_bytes", 0, "at least 1"),
        ("clock", "hours", "updates, iterations, lr_path, drift, drift_length"),
        ("draw", "uniform", "stratified, gumbel, groups"),
        ("eviction", "lifo", "fifo, lowest"),
        ("weights", "mean", "max, sum"),
        ("log_prob_dtype", "bfloat16", "float32, float16"),
        ("memory_map", "no/such/folder", "an existing folder"),
    ],
)
def test_a_bad_parameter_is_refused_with_what_is_allowed(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name} must be .*{allowed}.*, not {value!r}"):
        make_buffer(**{name: value})


def test_ids_grow_and_are_never_given_twice():
    buffer = make_buffer(capacity=3)
    assert buffer.add(of_rewards(1, 2), START).tolist() == [0, 1]
    assert buffer.add(of_rewards(3, 4), START).tolist() == [2, 3]
    assert buffer.ids().tolist() == [1, 2, 3]
    assert buffer.ids().dtype == np.int64
    assert buffer.add([], START).tolist() == []
    assert len(buffer) == 3


def test_what_is_drawn_is_what_was_added():
    buffer, items = make_buffer(), of_rewards(1, 2, 3)
    ids = buffer.add(items, START)
    for item, copy in zip(items, buffer.get(ids), strict=True):
        assert_same(item, copy)
    draw = buffer.sample(50, START, beta=0.4)
    for key, trajectory in zip(draw.ids, draw.trajectories, strict=True):
        assert_same(items[key], trajectory)


def test_changing_a_tensor_outside_does_not_change_what_is_stored():
    buffer, item = make_buffer(), make_trajectory(rewards=(1.0,))
    ids = buffer.add([item], START)
    item.rewards.fill_(9.0)
    assert buffer.get(ids)[0].rewards.tolist() == [1.0]


def test_an_evicted_id_is_a_key_error_that_names_it():
    buffer = make_buffer(capacity=1)
    buffer.add(of_rewards(1), START)
    buffer.add(of_rewards(2), START)
    with pytest.raises(KeyError, match=r"^0$"):
        buffer.get([0])


def test_more_than_the_capacity_at_once_is_refused_and_nothing_is_lost():
    buffer = make_buffer(capacity=2)
    buffer.add(of_rewards(1, 2), START)
    with pytest.raises(ValueError, match="at most the capacity, 2, not 3"):
        buffer.add(of_rewards(3, 4, 5), START)
    assert buffer.ids().tolist() == [0, 1]
    assert buffer.add(of_rewards(6), START).tolist() == [2]


def row_bytes(**fields):
    return TrajectoryStore().stage([make_trajectory(**fields)]).nbytes + ROW_BYTES


def test_the_byte_budget_evicts_the_oldest_and_is_never_exceeded():
    row = row_bytes()
    buffer = make_buffer(max_bytes=3 * row)
    buffer.add([make_trajectory() for _ in range(3)], START)
    assert buffer.nbytes == 3 * row
    buffer.add([make_trajectory(images=(b"x",))], START)
    assert buffer.ids().tolist() == [2, 3]
    assert buffer.nbytes == row + row_bytes(images=(b"x",))
    assert buffer.image_nbytes == image_nbytes(b"x")
    buffer.add([make_trajectory(images=(b"x" * (2 * row - 100),))], START)
    assert buffer.ids().tolist() == [4]


def test_a_set_that_alone_exceeds_the_byte_budget_is_refused():
    row = row_bytes()
    buffer = make_buffer(max_bytes=2 * row)
    buffer.add([make_trajectory()], START)
    with pytest.raises(ValueError, match=f"at most max_bytes, {2 * row}, not {3 * row}"):
        buffer.add([make_trajectory() for _ in range(3)], START)
    assert buffer.ids().tolist() == [0]


def test_a_new_entry_has_its_own_priority_at_once():
    buffer = make_buffer()
    buffer.add(of_rewards(100), START)
    buffer.add(of_rewards(1, 0), START)
    assert buffer.probabilities(START) == pytest.approx([100 / 101, 1 / 101, 0], rel=1e-15)


def test_age_is_counted_on_the_chosen_clock():
    now, later = ClockReading(updates=10, iteration=1), ClockReading(updates=30, iteration=3)
    for clock, age in (("updates", 20.0), ("iterations", 2.0)):
        buffer = make_buffer(clock=clock, decay=ExponentialDecay(tau=4))
        buffer.add(of_rewards(1), now)
        buffer.add(of_rewards(1), later)
        odds = buffer.probabilities(later)
        assert odds[0] / odds[1] == pytest.approx(np.exp(-age / 4), rel=1e-14)
        assert buffer.ages(later).tolist() == [age, 0.0]


def test_the_half_life_of_a_probability_includes_alpha():
    buffer = make_buffer(decay=ExponentialDecay(tau=50), alpha=0.6)
    buffer.add(of_rewards(2), START)
    buffer.add(of_rewards(2), ClockReading(updates=25))
    odds = buffer.probabilities(ClockReading(updates=1000))
    assert odds[0] / odds[1] == pytest.approx(np.exp(-0.6 * 25 / 50), rel=1e-14)


def test_entries_with_base_zero_are_never_drawn():
    buffer = make_buffer(alpha=0.1)
    buffer.add(of_rewards(0, 1e-30, 0, 5, 0), START)
    drawn = {int(key) for _ in range(100) for key in buffer.sample(64, START, beta=1.0).ids}
    assert drawn == {1, 3}


def test_an_empty_buffer_has_nothing_to_draw():
    buffer = make_buffer()
    assert buffer.probabilities(START).tolist() == []
    with pytest.raises(NothingToDraw, match="none of 0"):
        buffer.sample(1, START, beta=0.4)


def test_zero_rewards_without_eps_leave_nothing_to_draw():
    buffer = make_buffer()
    buffer.add(of_rewards(0, 0), START)
    with pytest.raises(NothingToDraw, match="none of 2"):
        buffer.sample(1, START, beta=0.4)
    assert buffer.draws() == 0
    buffer.add(of_rewards(1), START)
    assert buffer.sample(1, START, beta=0.4).ids.tolist() == [2]


def test_zero_rewards_with_eps_are_drawn_evenly():
    buffer = make_buffer(priority=AbsoluteReward(), alpha=0.6)
    buffer.add(of_rewards(0, 0, 0, 0), START)
    assert buffer.probabilities(START).tolist() == [0.25] * 4


def test_a_draw_reports_the_probabilities_weights_and_ages_of_its_moment():
    buffer = make_buffer(decay=ExponentialDecay(tau=10))
    buffer.add(of_rewards(4, 1), START)
    buffer.add(of_rewards(2), ClockReading(updates=3))
    now = ClockReading(updates=5)
    draw = buffer.sample(32, now, beta=0.7)
    every, ages = buffer.probabilities(now), buffer.ages(now)
    assert draw.probabilities.tolist() == every[draw.ids].tolist()
    assert draw.ages.tolist() == ages[draw.ids].tolist()
    weights = (3 * every[draw.ids]) ** -0.7
    assert draw.weights == pytest.approx(weights / weights.max(), rel=1e-14)
    assert draw.weights.dtype == draw.probabilities.dtype == draw.ages.dtype == np.float64


def test_weights_by_hand():
    buffer = make_buffer()
    buffer.add(of_rewards(1, 4, 4, 7), START)
    draw = buffer.sample(16, START, beta=0.5)
    # N P = 1/4, 1, 1, 7/4, and each of the slices of 1/16 lies inside one entry, so that all four are drawn.
    by_id = dict(zip(draw.ids.tolist(), draw.weights.tolist(), strict=True))
    assert by_id == pytest.approx({0: 1.0, 1: 0.5, 2: 0.5, 3: 7**-0.5}, rel=1e-14)
    assert np.bincount(draw.ids).tolist() == [1, 4, 4, 7]


def test_beta_zero_means_no_correction():
    buffer = make_buffer()
    buffer.add(of_rewards(1, 400), START)
    assert buffer.sample(16, START, beta=0.0).weights.tolist() == [1.0] * 16


@pytest.mark.parametrize(
    ("n", "beta", "name"), [(0, 0.4, "n"), (1.5, 0.4, "n"), (2.0, 0.4, "n"), (1, -0.1, "beta"), (1, 1.1, "beta")]
)
def test_a_bad_request_is_refused(n, beta, name):
    buffer = make_buffer()
    buffer.add(of_rewards(1), START)
    with pytest.raises(ValueError, match=f"^{name} must be"):
        buffer.sample(n, START, beta)


def test_draws_depend_on_seed_and_number_of_the_draw_only():
    one, same, other = make_buffer(seed=1), make_buffer(seed=1), make_buffer(seed=2)
    for buffer in (one, same, other):
        buffer.add(of_rewards(*range(1, 50)), START)
    first = one.sample(8, START, beta=0.4)
    np.random.seed(0)
    torch.manual_seed(0)
    assert_same_draw(first, same.sample(8, START, beta=0.4))
    second = one.sample(8, START, beta=0.4)
    assert one.draws() == 2
    assert first.ids.tolist() != second.ids.tolist()
    assert first.ids.tolist() != other.sample(8, START, beta=0.4).ids.tolist()


def test_draws_follow_the_probabilities_over_many_batches():
    buffer = make_buffer(decay=ExponentialDecay(tau=20), alpha=0.6)
    for update in range(5):
        buffer.add(of_rewards(0.1 + update, 3.0, 0.0), ClockReading(updates=update))
    now, batches, n = ClockReading(updates=9), 3000, 8
    counts = np.zeros(len(buffer))
    for _ in range(batches):
        np.add.at(counts, buffer.sample(n, now, beta=0.4).ids, 1)
    expected = batches * n * buffer.probabilities(now)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(batches / 2)).all()
    assert (counts[expected == 0] == 0).all()


def test_a_seed_that_is_assigned_is_the_one_that_counts():
    late, plain, other = make_buffer(), make_buffer(), make_buffer(seed=12)
    for buffer in (late, plain, other):
        buffer.add(of_rewards(*range(1, 60)), START)
        buffer.sample(8, START, beta=0.4)
    late.seed = 12
    copy = deepcopy(late)
    draw = late.sample(8, START, beta=0.4)
    assert draw.ids.tolist() != plain.sample(8, START, beta=0.4).ids.tolist()
    for buffer in (copy, other):
        assert_same_draw(draw, buffer.sample(8, START, beta=0.4))


@pytest.mark.parametrize(
    "name", ["capacity", "max_bytes", "priority", "clock", "alpha", "eviction", "asynchronous", "weights"]
)
def test_parameters_that_nothing_changes_are_read_only(name):
    buffer = make_buffer()
    value = getattr(buffer, name)
    with pytest.raises(AttributeError, match=f"property '{name}' of 'ReplayBuffer' object has no setter"):
        setattr(buffer, name, value)


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("seed", 1.5), ("decay", "none"), ("scheme", "best")])
def test_a_parameter_that_is_assigned_is_checked_and_a_wrong_one_changes_nothing(name, value):
    buffer = make_buffer()
    before = getattr(buffer, name)
    with pytest.raises(ValueError, match=f"{'draw' if name == 'scheme' else name} must be .* not {value!r}"):
        setattr(buffer, name, value)
    assert getattr(buffer, name) == before


@pytest.mark.parametrize("ids", [[1.9], [True], np.array([False, True]), 0, [[0]], ["0"]])
def test_ids_that_are_no_integers_in_one_sequence_are_refused(ids):
    buffer = make_buffer()
    buffer.add(of_rewards(1, 2), START)
    count = np.size(ids)
    calls = [buffer.get, buffer.bases, buffer.pin, buffer.unpin]
    calls += [lambda ids: buffer.update_priorities(ids, [3.0] * count)]
    calls += [lambda ids: buffer.observe(ids, [-1.0] * count, START)]
    for call in calls:
        with pytest.raises(ValueError, match="ids must be integers in one sequence"):
            call(ids)
    assert buffer.bases([0, 1]).tolist() == pytest.approx([1, 2])


@pytest.mark.parametrize("values", [1.0, [[-1.0]], [[-1.0, -2.0]]])
def test_values_that_are_not_in_one_sequence_are_refused(values):
    buffer = make_buffer()
    buffer.add(of_rewards(1, 2), START)
    with pytest.raises(ValueError, match="priorities must be numbers in one sequence"):
        buffer.update_priorities([0], np.abs(values))
    with pytest.raises(ValueError, match="log_fresh must be numbers in one sequence"):
        buffer.observe([0], values, START)
    with pytest.raises(ValueError, match="priorities must be numbers in one sequence"):
        buffer.add(of_rewards(1), START, priorities=np.abs(values))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_clock_that_is_not_finite_is_refused(value):
    buffer = make_buffer(clock="drift")
    with pytest.raises(ValueError, match=r"reading of the clock \(drift\) must be finite"):
        buffer.add(of_rewards(1), ClockReading(drift=value))
    with pytest.raises(ValueError, match=r"reading of the clock \(drift\) must be finite"):
        buffer.probabilities(ClockReading(drift=value))
    assert len(buffer) == 0


class Nameless(Priority):
    def base(self, trajectory):
        return 1.0


def test_a_priority_that_no_saved_state_could_name_is_refused():
    with pytest.raises(ValueError, match="priority must be a dataclass"):
        make_buffer(priority=Nameless())


def test_update_replaces_base_priorities_and_keeps_ages():
    buffer = make_buffer(decay=ExponentialDecay(tau=10))
    buffer.add(of_rewards(1, 1, 1), START)
    now = ClockReading(updates=5)
    assert buffer.update_priorities([0, 2, 2], [2.0, 9.0, 5.0]) == 0
    assert buffer.probabilities(now) == pytest.approx([2 / 8, 1 / 8, 5 / 8], rel=1e-14)
    assert buffer.ages(now).tolist() == [5, 5, 5]
    buffer.update_priorities([1], [0.0])
    assert buffer.probabilities(now)[1] == 0


def test_update_passes_over_evicted_ids_and_says_how_many():
    buffer = make_buffer(capacity=2)
    buffer.add(of_rewards(1, 1), START)
    buffer.add(of_rewards(1), START)
    assert buffer.update_priorities([0, 1, 77], [5.0, 3.0, 5.0]) == 2
    assert buffer.probabilities(START) == pytest.approx([0.75, 0.25], rel=1e-15)
    assert make_buffer().update_priorities([4], [1.0]) == 1


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_bad_priority_is_refused_and_nothing_changes(value):
    buffer = make_buffer()
    buffer.add(of_rewards(1, 1), START)
    with pytest.raises(ValueError, match="priority must be finite and at least 0"):
        buffer.update_priorities([0, 1], [7.0, value])
    assert buffer.probabilities(START).tolist() == [0.5, 0.5]


def test_ids_and_values_of_different_lengths_are_refused():
    buffer = make_buffer()
    buffer.add(of_rewards(1, 1), START)
    with pytest.raises(ValueError, match="one length"):
        buffer.update_priorities([0, 1], [7.0])


def test_observed_freshness_restarts_the_age():
    buffer = make_buffer(decay=ExponentialDecay(tau=10))
    buffer.add(of_rewards(1, 1), START)
    now, later = ClockReading(updates=30), ClockReading(updates=35)
    assert buffer.observe([0, 9], [-0.5, -1.0], now) == 1
    assert buffer.ages(later).tolist() == [5, 35]
    odds = buffer.probabilities(later)
    assert odds[0] / odds[1] == pytest.approx(np.exp(-0.5 - 0.5) / np.exp(-3.5), rel=1e-14)


@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_freshness_above_one_is_refused(value):
    buffer = make_buffer()
    buffer.add(of_rewards(1), START)
    with pytest.raises(ValueError, match="log_fresh must be at most 0"):
        buffer.observe([0], [value], START)


def test_a_clock_that_runs_backwards_is_refused():
    buffer = make_buffer()
    buffer.add(of_rewards(1), ClockReading(updates=5))
    for use in (
        lambda now: buffer.add(of_rewards(1), now),
        lambda now: buffer.sample(1, now, beta=0.4),
        lambda now: buffer.observe([0], [0.0], now),
        buffer.probabilities,
        buffer.prefetch,
        buffer.ages,
    ):
        with pytest.raises(ValueError, match=r"now \(updates\) must be at least 5"):
            use(ClockReading(updates=4))


def test_a_priority_whose_input_is_missing_stops_the_add():
    buffer = make_buffer(priority=AbsoluteAdvantage())
    with pytest.raises(ValueError, match="no advantages"):
        buffer.add([make_trajectory(advantages=(1.0,)), make_trajectory()], START)
    with pytest.raises(ValueError, match="needs a critic"):
        make_buffer(priority=TDError()).add([make_trajectory()], START)
    assert len(buffer) == 0


def test_a_reward_that_is_not_a_number_stops_the_add_and_names_the_trajectory():
    with pytest.raises(ValueError, match=r"AbsoluteReward.* of member 3 of group 7 must be finite"):
        make_buffer().add([make_trajectory(rewards=(float("nan"),), member=3, group=7)], START)
