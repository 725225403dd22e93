from itertools import permutations

import numpy as np
import pytest

from freshper_lightning.replay import GumbelTopK, NoDecay, NothingToDraw, UniformPriority, WholeGroups
from tests.replay.builders import START, make_buffer, make_trajectory, of_rewards


def drawn(buffer, n, batches, beta=0.0):
    return [buffer.sample(n, START, beta) for _ in range(batches)]


def test_stratified_draws_are_unbiased_over_ten_thousand_batches():
    buffer, batches, n = make_buffer(), 10_000, 5
    buffer.add(of_rewards(0.05, 3.0, 0.0, 1.0, 0.4, 1.3, 0.001), START)
    counts = sum(np.bincount(draw.ids, minlength=7) for draw in drawn(buffer, n, batches))
    expected = batches * n * buffer.probabilities(START)
    # The variance of a count in one batch is at most 1/2, from its two ends.
    assert (np.abs(counts - expected) <= 5 * np.sqrt(batches * np.minimum(0.5, expected / batches))).all()


def inclusion_probabilities(masses, n):
    """Of drawing one by one without replacement, by enumeration of all orders."""
    inclusion, total = np.zeros(len(masses)), sum(masses)
    for order in permutations(range(len(masses)), n):
        probability, left = 1.0, total
        for index in order:
            probability *= masses[index] / left
            left -= masses[index]
        inclusion[list(order)] += probability
    return inclusion


@pytest.mark.parametrize(("masses", "n"), [((1, 2, 3, 10), 2), ((5, 0.1, 1, 1, 0), 3), ((1, 1, 8), 1)])
def test_gumbel_draws_include_entries_as_if_drawn_one_by_one(masses, n):
    buffer, batches = make_buffer(draw="gumbel"), 4000
    buffer.add(of_rewards(*masses), START)
    expected = inclusion_probabilities([mass for mass in masses if mass], n)
    counts = np.zeros(len(masses))
    for draw in drawn(buffer, n, batches):
        assert len(set(draw.ids.tolist())) == n
        counts[draw.ids] += 1
    counts = counts[np.array(masses) > 0]
    assert (np.abs(counts - batches * expected) <= 5 * np.sqrt(batches * expected * (1 - expected)) + 1e-9).all()


def test_inverse_inclusion_given_the_threshold_is_an_unbiased_weight():
    """E[1{i drawn} P_i / q_i(kappa)] = P_i for every entry: the weighted sum of a batch is unbiased."""
    buffer, batches = make_buffer(), 6000
    buffer.add(of_rewards(1, 2, 3, 10), START)
    masses, columns = buffer._masses_at(START), buffer._content.columns
    random, sums, squares = np.random.default_rng(0), np.zeros(4), np.zeros(4)
    for _ in range(batches):
        picked = GumbelTopK().pick(masses, columns, 2, random)
        values = np.zeros(4)
        values[picked.rows] = picked.shares / picked.expected
        sums, squares = sums + values, squares + values**2
    error = np.sqrt((squares / batches - (sums / batches) ** 2) / batches)
    assert (np.abs(sums / batches - np.array([1, 2, 3, 10]) / 16) <= 5 * error).all()


def test_gumbel_draws_of_everything_have_no_correction_left():
    buffer = make_buffer(draw="gumbel")
    buffer.add(of_rewards(1, 4, 0, 7), START)
    draw = buffer.sample(3, START, beta=1.0)
    assert sorted(draw.ids.tolist()) == [0, 1, 3]
    assert draw.weights.max() == pytest.approx(draw.weights.min(), rel=1e-12)


def test_gumbel_draws_of_more_than_have_mass_are_refused():
    buffer = make_buffer(draw="gumbel")
    buffer.add(of_rewards(1, 4, 0), START)
    with pytest.raises(NothingToDraw, match=r"only 2 trajectories .* too few for 3"):
        buffer.sample(3, START, beta=0.4)
    assert buffer.draws() == 0


def groups(*rewards_by_group):
    return [
        make_trajectory(rewards=(float(reward),), group=group, member=member)
        for group, rewards in enumerate(rewards_by_group)
        for member, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(("mass", "expected"), [("mean", [3 / 12, 9 / 12, 0]), ("max", [2 / 9, 7 / 9, 0])])
def test_groups_are_drawn_whole_by_the_mean_or_maximum_of_their_members(mass, expected):
    buffer, batches = make_buffer(draw=WholeGroups(mass)), 3000
    buffer.add(groups([1, 2], [7, 2], [0, 0]), START)
    counts = np.zeros(3)
    for draw in drawn(buffer, 4, batches, beta=1.0):
        pairs = draw.ids.reshape(2, 2)
        assert (pairs % 2 == [0, 1]).all()
        assert (pairs[:, 0] // 2 == pairs[:, 1] // 2).all()
        assert (draw.weights.reshape(2, 2)[:, 0] == draw.weights.reshape(2, 2)[:, 1]).all()
        np.add.at(counts, pairs[:, 0] // 2, 1)
        assert draw.probabilities == pytest.approx(np.repeat(expected, 2)[draw.ids] / 2, rel=1e-14)
    assert (np.abs(counts - 2 * batches * np.array(expected)) <= 5 * np.sqrt(batches / 2)).all()


def test_a_group_that_has_lost_a_member_is_not_drawn():
    buffer = make_buffer(draw="groups", capacity=5)
    buffer.add(groups([9, 9], [1, 1], [2, 2])[:5], START)
    buffer.add(groups([0], [0], [2, 2])[3:], START)
    assert buffer.ids().tolist() == [1, 2, 3, 4, 5]
    assert {key for draw in drawn(buffer, 2, 50) for key in draw.ids.tolist()} == {2, 3, 4, 5}


def test_a_batch_that_is_no_multiple_of_the_group_size_is_refused():
    buffer = make_buffer(draw="groups")
    buffer.add(groups([1, 1, 1]), START)
    with pytest.raises(ValueError, match="n must be a multiple of the group size, 3, not 4"):
        buffer.sample(4, START, beta=0.4)


def test_groups_without_mass_are_nothing_to_draw():
    buffer = make_buffer(draw="groups")
    with pytest.raises(NothingToDraw):
        buffer.sample(2, START, beta=0.4)
    buffer.add(groups([0, 0]), START)
    with pytest.raises(NothingToDraw):
        buffer.sample(2, START, beta=0.4)


def test_a_group_mass_of_another_name_is_refused():
    with pytest.raises(ValueError, match="'mean' or 'max', not 'sum'"):
        WholeGroups("sum")


@pytest.mark.parametrize(
    ("draw", "first", "later"), [("newest", [5, 7, 8], [8, 9, 10]), ("oldest", [0, 1, 3], [3, 4, 5])]
)
def test_newest_and_oldest_go_by_age_and_leave_out_what_has_no_priority(draw, first, later):
    buffer = make_buffer(draw=draw, decay=NoDecay(), capacity=9)
    buffer.add(of_rewards(1, 9, 0, 3, 1, 1, 0, 9, 1), START)
    assert buffer.sample(3, START, beta=1.0).ids.tolist() == first
    assert buffer.sample(3, START, beta=1.0).weights.tolist() == [1, 1, 1]
    buffer.add(of_rewards(1, 1), START)
    assert sorted(buffer.sample(3, START, beta=1.0).ids.tolist()) == later


def test_sums_of_weights_count_an_entry_that_comes_up_twice_once():
    buffer = make_buffer(priority=UniformPriority())
    buffer.add(of_rewards(1), START)
    assert buffer.sample(5, START, beta=0.4).weight_sums() == (5, 25)
    buffer.add(of_rewards(*range(9)), START)
    assert buffer.sample(10, START, beta=0.4).weight_sums() == pytest.approx((10, 10))


def test_a_group_of_less_than_the_given_size_is_not_drawn_though_none_is_larger():
    buffer = make_buffer(draw=WholeGroups(size=3))
    buffer.add(groups([9, 9], [9, 9]), START)
    with pytest.raises(NothingToDraw, match="no whole group"):
        buffer.sample(3, START, beta=0.4)
    buffer.add([make_trajectory((1.0,), group=7, member=member) for member in range(3)], START)
    assert buffer.sample(3, START, beta=0.4).ids.tolist() == [4, 5, 6]


def test_an_impossible_size_of_groups_is_refused():
    with pytest.raises(ValueError, match="size of a group must be at least 1, or none, not 0"):
        WholeGroups(size=0)
