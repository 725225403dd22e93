"""What of the buffer is drawn, skipped, pinned, saved and restored."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.replay import (
    AbsoluteAdvantage,
    AbsoluteReward,
    UniformPriority,
)
from freshper_lightning.trajectory import ClockReading
from tests.datamodules.modules import DRAWS, bound, of_advantages
from tests.loop import replay_data
from tests.replay.builders import make_trajectory


def test_the_state_restores_content_and_what_is_fresh():
    data, other = (replay_data(batch_size=2, priority=UniformPriority()) for _ in range(2))
    for module in (data, other):
        module.bind(4, ClockReading)
    data.add_fresh([make_trajectory(advantages=(1.0,)) for _ in range(2)])
    data.add_fresh([make_trajectory(advantages=(float(i),), member=i) for i in range(4)])
    other.load_state_dict(data.state_dict())
    for update in range(data.updates_per_iteration):
        (mine,), (restored,) = data.optimizer_batch(update), other.optimizer_batch(update)
        assert mine.ids.tolist() == restored.ids.tolist()
        assert torch.equal(mine.input_ids, restored.input_ids)


def test_ranks_with_equal_content_draw_with_random_numbers_of_their_own():
    drawn = []
    for rank in range(2):
        data = replay_data()
        data.trainer = SimpleNamespace(world_size=2, global_rank=rank)
        data.bind(4, ClockReading, 1)
        data.buffer.add(of_advantages(*range(1, 60)), ClockReading())
        drawn.append([data.buffer.sample(8, ClockReading(), beta=0.4).ids.tolist() for _ in range(3)])
    assert all(one != other for one, other in zip(*drawn, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
def test_an_update_is_skipped_where_there_is_too_little_to_draw_and_the_next_is_not(draw):
    data = bound(draw=DRAWS[draw], priority=AbsoluteAdvantage(eps=0.0))
    data.add_fresh(of_advantages(0, 0, 0, 0))
    (batch,) = data.optimizer_batch(1)
    assert batch.skip
    assert batch.is_filler
    assert (data.last_draw, data.effective_draw, data.buffer.draws()) == (None, 0.0, 0)
    data.add_fresh(of_advantages(1, 2, 0, 0, group=1))
    (batch,) = data.optimizer_batch(1)
    distinct = draw in ("gumbel", "newest", "oldest")
    assert batch.skip == distinct
    assert data.buffer.draws() == (0 if distinct else 1)
    data.add_fresh(of_advantages(1, 2, 3, 4, group=2))
    (batch,) = data.optimizer_batch(1)
    assert not batch.skip
    assert len(batch.ids) == 4
    total, squares = data.last_draw.weight_sums()
    assert data.effective_draw == total**2 / squares > 0


def test_nothing_is_drawn_before_the_buffer_has_its_minimum_size():
    data = bound(minimum_size=6)
    for skipped in (True, False):
        data.add_fresh(of_advantages(1, 2, 3, 4))
        assert data.optimizer_batch(1)[0].skip is skipped


def test_a_loss_divides_by_what_a_draw_from_one_buffer_would_have():
    """Without replacement a likely trajectory comes up once, and its tokens count for all the times it would have."""
    items = [make_trajectory((reward,), (tokens,), advantages=(reward,)) for reward, tokens in ((9.0, 8), (1.0, 1))]
    data = bound(size=2, batch_size=2, group_size=1, draw="gumbel", alpha=1.0, priority=AbsoluteReward(eps=0.0))
    data.add_fresh(items)
    for _ in range(3):
        (batch,) = data.optimizer_batch(1)
        lengths = np.array([item.num_sampled for item in data.last_draw.trajectories])
        assert batch.total_tokens == pytest.approx(float(lengths @ data.last_draw.multiplicities))
        assert batch.total_sequences == 2
    # Both are always drawn, so that P_i over the expected count of 1, times n, are the multiplicities.
    assert batch.total_tokens == pytest.approx(2 * (0.9 * 8 + 0.1 * 1), rel=1e-12)


def test_fresh_trajectories_are_pinned_while_they_are_trained_on():
    data = bound(capacity=6, eviction="lowest", priority=AbsoluteAdvantage(eps=0.0), epochs=2)
    data.add_fresh(of_advantages(0, 0, 0, 0))
    for more in ((5, 6), (7, 8)):  # from elsewhere, and worth more
        data.buffer.add(of_advantages(*more), ClockReading())
    assert data.buffer.pinned().tolist() == [0, 1, 2, 3]
    assert [sorted(data.optimizer_batch(update)[0].ids.tolist()) for update in (0, 1)] == [[0, 1, 2, 3]] * 2
    data.add_fresh(of_advantages(1, 1, 1, 1))
    assert data.buffer.pinned().tolist() == [8, 9, 10, 11]
    assert data.buffer.ids().tolist() == [6, 7, 8, 9, 10, 11]


def test_a_byte_budget_does_not_cost_what_is_still_to_be_trained_on():
    plain = bound()
    plain.add_fresh(of_advantages(1, 1, 1, 1))
    data = bound(max_bytes=plain.buffer.nbytes + 10)
    data.add_fresh(of_advantages(1, 1, 1, 1))
    with pytest.raises(ValueError, match="all that is left is pinned"):
        data.buffer.add(of_advantages(1), ClockReading())
    data.add_fresh(of_advantages(1, 1, 1, 1))
    assert data.buffer.ids().tolist() == [4, 5, 6, 7]


def test_pins_are_those_of_the_run_that_was_saved_in_the_middle_of_an_iteration():
    data, other = (bound(capacity=6, eviction="lowest", priority=AbsoluteAdvantage(eps=0.0)) for _ in range(2))
    data.add_fresh(of_advantages(0, 0, 0, 0))
    data.optimizer_batch(0), data.optimizer_batch(1)
    other.load_state_dict(data.state_dict())
    assert other.buffer.pinned().tolist() == [0, 1, 2, 3]
    for module in (data, other):
        module.add_fresh(of_advantages(1, 0, 2, 0))
        module.buffer.add(of_advantages(3, 4), ClockReading())
    assert data.buffer.pinned().tolist() == other.buffer.pinned().tolist() == [4, 5, 6, 7]
    assert data.buffer.ids().tolist() == other.buffer.ids().tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("damage", ["fresh", "buffer"])
def test_a_damaged_state_is_refused(damage):
    data, other = bound(), bound()
    data.add_fresh(of_advantages(1, 2, 3, 4))
    state = data.state_dict()
    if damage == "fresh":
        state["fresh"] = state["fresh"] + 1
    else:
        state["buffer"]["columns"]["since"] = state["buffer"]["columns"]["since"][:-1]
    with pytest.raises(ConfigurationError, match="damaged"):
        other.load_state_dict(state)
