import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay import ExponentialDecay, Fifo, HardAge, Lowest
from freshper_lightning.replay.eviction import smallest
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import START, assert_same, assert_same_draw, make_buffer, make_trajectory, of_rewards


def test_the_lowest_priority_of_the_moment_goes_first_and_the_oldest_of_equal_ones():
    buffer = make_buffer(capacity=4, eviction="lowest", decay=ExponentialDecay(tau=10))
    buffer.add(of_rewards(5, 1, 2, 1), START)
    buffer.add(of_rewards(0.001), ClockReading(updates=1))
    assert buffer.ids().tolist() == [0, 2, 3, 4]
    buffer.observe([0], [-50.0], ClockReading(updates=2))
    buffer.add(of_rewards(3, 3), ClockReading(updates=40))
    assert buffer.ids().tolist() == [2, 3, 5, 6]


def test_hard_age_counts_from_the_add_and_does_not_wait_for_a_full_buffer():
    buffer = make_buffer(eviction=HardAge(max_age=10))
    buffer.add(of_rewards(1, 1), START)
    buffer.add(of_rewards(1), ClockReading(updates=5))
    buffer.observe([0], [0.0], ClockReading(updates=8))
    buffer.pin([1])
    buffer.add(of_rewards(1), ClockReading(updates=10))
    assert buffer.ids().tolist() == [0, 1, 2, 3]
    buffer.add([], ClockReading(updates=11))
    assert buffer.ids().tolist() == [1, 2, 3]


@pytest.mark.parametrize("eviction", ["fifo", "lowest", Fifo(), Lowest(), HardAge(1)])
def test_what_is_pinned_stays_and_too_much_of_it_is_an_error_that_changes_nothing(eviction):
    buffer = make_buffer(capacity=4, eviction=eviction)
    buffer.add(of_rewards(0, 0), START, pin=True)
    buffer.add(of_rewards(5, 6), START)
    buffer.add(of_rewards(7), ClockReading(updates=9))
    assert set(buffer.ids().tolist()) >= {0, 1, 4}
    with pytest.raises(ValueError, match=r"room for 1 more .* is needed, but all that is left is pinned"):
        buffer.add(of_rewards(1, 1, 1), ClockReading(updates=9))
    assert set(buffer.ids().tolist()) >= {0, 1, 4}
    assert buffer.pinned().tolist() == [0, 1]
    buffer.unpin([0])
    assert buffer.add(of_rewards(1, 1, 1), ClockReading(updates=9)).tolist() == [5, 6, 7]
    assert buffer.ids().tolist() == [1, 5, 6, 7]
    buffer.unpin()
    assert buffer.pinned().tolist() == []


def with_room_for(size, items, pin=False):
    """A buffer that has the trajectories, and room for so many more bytes."""
    alone = make_buffer()
    alone.add(items, START)
    buffer = make_buffer(max_bytes=alone.nbytes + size)
    buffer.add(items, START, pin=pin)
    return buffer


def test_pinned_bytes_do_not_give_way_either():
    buffer = with_room_for(100, [make_trajectory(images=(bytes(5000),))], pin=True)
    with pytest.raises(ValueError, match="more bytes is needed, but all that is left is pinned"):
        buffer.add([make_trajectory()], START)
    buffer.add([], START)
    larger = make_buffer(max_bytes=buffer.max_bytes + 5000)
    larger.load_state_dict(buffer.state_dict())
    larger.add([make_trajectory(images=(bytes(5000),))] * 10, START)
    assert len(larger) == 11


def test_pinning_an_unknown_id_is_a_key_error_and_pins_nothing():
    buffer = make_buffer()
    buffer.add(of_rewards(1), START)
    for call in (buffer.pin, buffer.unpin):
        with pytest.raises(KeyError, match=r"^7$"):
            call([0, 7])
    assert buffer.pinned().tolist() == []


def test_pins_are_part_of_the_state():
    buffer, restored = make_buffer(capacity=2), make_buffer(capacity=2)
    buffer.add(of_rewards(1, 1), START)
    buffer.pin([0])
    restored.load_state_dict(buffer.state_dict())
    restored.add(of_rewards(1), START)
    assert restored.ids().tolist() == [0, 2]


def test_a_draw_keeps_its_trajectories_though_they_are_evicted_before_it_is_looked_at():
    buffer, items = make_buffer(capacity=3), of_rewards(1, 2, 3)
    buffer.add(items, START)
    early, late = buffer.sample(8, START, beta=0.4), buffer.sample(8, START, beta=0.4)
    assert not early.is_read()
    buffer.add(of_rewards(4, 5, 6), START)
    assert late.is_read()
    for draw in (early, late):
        for key, trajectory in zip(draw.ids, draw.trajectories, strict=True):
            assert_same(trajectory, items[key])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda draw: pickle.loads(pickle.dumps(draw))])
def test_a_copy_of_a_draw_has_its_trajectories_with_it(copied):
    buffer = make_buffer()
    buffer.add(of_rewards(1, 2, 3), START)
    draw = buffer.sample(8, START, beta=0.4)
    assert_same_draw(draw, copied(draw))
    assert copied(draw).multiplicities.tolist() == draw.multiplicities.tolist()


def test_shared_images_are_counted_when_bytes_are_short():
    a, b = bytes(4000), b"b" * 4000
    items = [make_trajectory(images=(a,)), make_trajectory(images=(a,)), make_trajectory(images=(b,))]
    buffer = with_room_for(1000, items)
    buffer.add([make_trajectory(images=(b"c" * 4000,))], START)
    assert buffer.ids().tolist() == [2, 3]  # the first alone would free nothing but its row
    buffer.add([make_trajectory(images=(b"b" * 4000,))], START)
    assert buffer.ids().tolist() == [2, 3, 4]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0, 5), min_size=1, max_size=40), st.data())
def test_the_smallest_come_in_order_and_the_first_of_equal_ones_first(values, data):
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=values.__getitem__)[:count]
    assert smallest(np.array(values), count).tolist() == expected


@pytest.mark.parametrize("max_age", [-1.0, float("nan")])
def test_a_bad_greatest_age_is_refused(max_age):
    with pytest.raises(ValueError, match="max_age must be"):
        HardAge(max_age)
