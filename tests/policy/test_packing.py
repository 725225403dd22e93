import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.policy.packing import ATTENTION_TOKENS, balanced_parts, cheapest_rows, pack_rows
from tests.policy.transcripts import alone, packed, statistics, trajectory, transcript

LENGTHS = [240, 66, 156, 42, 126, 72, 240, 30]


@given(lengths=st.lists(st.integers(1, 50), max_size=40), extra=st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_every_conversation_is_in_one_row_and_no_row_is_over_full(lengths, extra):
    width = max(lengths, default=1) + extra
    rows = pack_rows(lengths, width)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= width for row in rows)
    assert all(rows)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing_wastes_less_than_half_of_all_rows_but_one(lengths):
    rows = pack_rows(lengths, max(lengths))
    fills = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(fill > max(lengths) / 2 for fill in fills[1:])


def test_a_conversation_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"9 tokens.*row of 8"):
        pack_rows([3, 9], 8)


@given(lengths=st.lists(st.integers(1, 200), max_size=30), parts=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_parts_take_every_conversation_once_in_order_and_are_balanced(lengths, parts):
    groups = balanced_parts(lengths, parts)
    assert len(groups) == parts
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(group == sorted(group) for group in groups)
    loads = [sum(lengths[index] for index in group) for group in groups]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_parts_are_far_better_balanced_than_a_split_by_number():
    generator = np.random.default_rng(0)
    lengths = (20 * generator.pareto(1.5, 64) + 20).astype(int).tolist()
    loads = [sum(lengths[i] for i in part) for part in balanced_parts(lengths, 4)]
    by_number = [sum(part) for part in np.array_split(lengths, 4)]
    assert max(loads) <= 1.01 * max(sum(lengths) / 4, max(lengths))
    assert max(by_number) > 1.1 * max(loads)


def cost(lengths, rows):
    width = max(sum(lengths[index] for index in row) for row in rows)
    return len(rows) * width * (ATTENTION_TOKENS + width)


@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=24))
@settings(max_examples=100, deadline=None)
def test_chosen_rows_hold_every_conversation_and_cost_no_more_than_the_narrowest_or_a_single_one(lengths):
    rows = cheapest_rows(lengths)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert cost(lengths, rows) <= cost(lengths, pack_rows(lengths, max(lengths)))
    assert cost(lengths, rows) <= cost(lengths, [list(range(len(lengths)))])


def test_rows_are_wide_where_room_would_be_left_over_and_narrow_where_attention_would_cost_more():
    assert len(cheapest_rows([60] * 7 + [100])) < 8, "a row of 100 would hold one conversation"
    assert len(cheapest_rows([1000] * 8)) == 8


def test_short_conversations_share_rows_and_some_room_is_left_over():
    batch = packed([transcript(length, seed) for seed, length in enumerate(LENGTHS)])
    starts = (batch.position_ids == 0).sum(1)
    assert 1 < len(batch.input_ids) < len(LENGTHS)
    assert int(starts.max()) >= 3
    assert int(starts.sum()) > len(LENGTHS), "no row has left-over room, which this batch is made to have"


def test_packed_log_probs_are_those_of_each_conversation_alone(net):
    items = [transcript(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = packed(items)
    seen = statistics(net, batch)
    for index, item in enumerate(items):
        log_probs, entropy = alone(net, item)
        mine = batch.segments == index
        torch.testing.assert_close(seen.log_probs[mine].double(), log_probs, rtol=0, atol=1e-6)
        torch.testing.assert_close(seen.entropy[mine].double(), entropy, rtol=0, atol=2e-6)


def test_several_turns_of_one_conversation_are_trained_on_and_the_rest_is_not(net):
    item = transcript(30, turns=[(1, 4), (9, 10), (20, 30)])
    batch = packed([transcript(12, 5), item])
    assert batch.lengths.tolist() == [4, 14]
    assert batch.targets[batch.segments == 1].tolist() == item.token_ids[item.sampled_mask()].tolist()
    log_probs, _ = alone(net, item)
    seen = statistics(net, batch).log_probs[batch.segments == 1]
    torch.testing.assert_close(seen.double(), log_probs, rtol=0, atol=1e-6)


@given(order=st.permutations(range(len(LENGTHS))))
@settings(max_examples=10, deadline=None)
def test_the_order_of_conversations_changes_nothing_but_the_order(net, order):
    items = [trajectory(length, seed) for seed, length in enumerate(LENGTHS)]
    weights, ids = torch.arange(8) / 8, torch.arange(8) + 100
    batch = packed(items, importance_weights=weights, ids=ids, ages=ids.double())
    other = packed(
        [items[i] for i in order],
        importance_weights=weights[list(order)],
        ids=ids[list(order)],
        ages=ids[list(order)].double(),
    )
    seen, again = statistics(net, batch).log_probs, statistics(net, other).log_probs
    for place, index in enumerate(order):
        here, there = batch.segments == index, other.segments == place
        torch.testing.assert_close(again[there], seen[here], rtol=0, atol=1e-6)
        for name in ("targets", "behavior_log_probs", "advantages"):
            assert torch.equal(getattr(other, name)[there], getattr(batch, name)[here])
        for name in ("lengths", "importance_weights", "ids", "ages"):
            assert getattr(other, name)[place] == getattr(batch, name)[index]


def test_an_empty_batch_is_a_filler_that_runs_and_weighs_nothing(net):
    batch = packed([])
    assert batch.is_filler
    assert batch.skip
    assert batch.importance_weights.tolist() == [0.0]
    log_probs = statistics(net, batch).log_probs
    assert log_probs.shape == (1,)
    (log_probs * batch.importance_weights).sum().backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in net.parameters())
    net.zero_grad()


def test_a_demonstration_has_no_behavior_policy_no_advantages_and_no_ids():
    batch = packed([transcript(9), transcript(6)], phase="demonstration")
    assert batch.behavior_log_probs is None
    assert batch.advantages is None
    assert batch.ids.tolist() == [-1, -1]


def test_moving_a_batch_moves_its_tensors_and_keeps_the_rest():
    batch = packed([trajectory(9), trajectory(6)], ids=torch.tensor([4, 9]))
    batch.total_sequences, batch.ends_iteration = 2.0, True
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.ages.device.type == "meta"
    assert (moved.phase, moved.total_sequences, moved.ends_iteration) == ("fresh", 2.0, True)
    assert batch.input_ids.device.type == "cpu"
