import math

import numpy as np
import pytest

from freshper_lightning.inspection import SORTS, entries, first
from freshper_lightning.replay import ExponentialDecay
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_buffer, make_trajectory

NOW = ClockReading(updates=9)


@pytest.fixture
def buffer():
    """Ten episodes of which two are alike, all with different histories; the last has no advantages yet."""
    buffer = make_buffer(alpha=0.6, decay=ExponentialDecay(tau=4))
    for update in range(5):
        items = [make_trajectory((update + k, 1.0), advantages=(k - 0.5, 2.0 - update)) for k in range(2)]
        items = items if update < 4 else [items[0], make_trajectory((3.0, 1.0))]
        buffer.add(items, ClockReading(updates=update))
    buffer.observe([2, 5], [-0.7, -0.2], ClockReading(updates=6))
    buffer.update_priorities([7], [30.0])
    for _ in range(4):
        buffer.sample(8, NOW, beta=0.4)
    return buffer


def test_every_number_is_the_buffers(buffer):
    before = buffer.draws()
    found = list(entries(buffer, NOW))
    ids = buffer.ids()
    assert [entry.id for entry in found] == ids.tolist()
    assert [entry.base for entry in found] == buffer.bases(ids).tolist()
    assert [entry.draws for entry in found] == buffer.times_drawn(ids).tolist()
    assert [entry.age for entry in found] == buffer.ages(NOW).tolist()
    assert [entry.probability for entry in found] == buffer.probabilities(NOW).tolist()
    assert [entry.id for entry in found if entry.freshness != 1] == [2, 5]
    assert found[2].freshness == pytest.approx(math.exp(-0.7))
    powers = np.array([entry.priority for entry in found]) ** 0.6
    np.testing.assert_allclose(powers / powers.sum(), buffer.probabilities(NOW), rtol=1e-12)
    assert sum(entry.draws for entry in found) == 4 * 8
    assert buffer.draws() == before, "looking is not drawing"
    for entry in found:
        assert entry.trajectory.rewards.tolist() == buffer.get([entry.id])[0].rewards.tolist()


def test_an_advantage_is_that_of_the_mean_token(buffer):
    (entry,) = entries(buffer, NOW, [3])
    assert entry.mean_advantage() == pytest.approx((2 * 0.5 + 2 * 1.0) / 4)
    (without,) = entries(buffer, NOW, [9])
    assert without.mean_advantage() is None


@pytest.mark.parametrize("sort", SORTS)
def test_the_greatest_come_first_and_of_equal_ones_the_oldest(buffer, sort):
    every = list(entries(buffer, NOW))
    shown = first(buffer, NOW, sort, top=4)
    key = SORTS[sort]
    assert [entry.id for entry in shown] == [e.id for e in sorted(every, key=lambda e: (-key(e), e.id))][:4]
    assert len({key(entry) for entry in every}) > 1
    assert len(first(buffer, NOW, sort, top=99)) == len(every)


def test_what_is_asked_for_and_not_there_is_named(buffer):
    with pytest.raises(ValueError, match=r"ids=\[77\] must be stored in the buffer, which holds 10 ids from 0 to 9"):
        entries(buffer, NOW, [3, 77])
    with pytest.raises(ValueError, match="which holds nothing"):
        entries(make_buffer(), NOW, [3])
    with pytest.raises(ValueError, match="sort='best' must be one of priority, age, return, advantage, newest, draws"):
        first(buffer, NOW, "best")
    with pytest.raises(ValueError, match="top=0 must be at least 1"):
        first(buffer, NOW, top=0)
    assert first(make_buffer(), NOW) == []
