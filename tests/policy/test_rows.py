import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.policy.rows import (
    ATTENTION_TOKENS,
    Opening,
    balanced_parts,
    cheapest_layout,
    cheapest_rows,
    micro_batches_of,
    pack_rows,
    room,
)
from tests.policy.transcripts import context, family, packed, trajectory, transcript


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


FAMILIES = st.lists(
    st.tuples(st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1, max_size=9)), min_size=1, max_size=6
)


def conversations(families):
    """Lengths and openings, one family after another."""
    lengths = [opening + tail for opening, tails in families for tail in tails]
    openings = [Opening(number, opening) for number, (opening, tails) in enumerate(families) for _ in tails]
    return lengths, openings


def layout_cost(layout):
    width = max(sum(block.length for block in row) for row in layout)
    return len(layout) * width * (ATTENTION_TOKENS + width)


@given(families=FAMILIES)
@settings(max_examples=100, deadline=None)
def test_a_layout_holds_every_conversation_once_and_costs_no_more_than_without_sharing(families):
    lengths, openings = conversations(families)
    layout = cheapest_layout(lengths, openings)
    blocks = [block for row in layout for block in row]
    assert sorted(member for block in blocks for member in block.members) == list(range(len(lengths)))
    for block in blocks:
        assert len({openings[member].content for member in block.members}) == 1
        assert block.opening == (openings[block.members[0]].length if len(block.members) > 1 else 0)
        tails = [lengths[member] - block.opening for member in block.members]
        assert block.length == block.opening + sum(tails)
    alone = cheapest_layout(lengths, None)
    assert layout_cost(layout) <= layout_cost(alone)
    assert room(layout) <= room(alone)


def test_openings_are_shared_where_that_saves_more_than_wider_rows_cost():
    lengths, openings = conversations([(300, [20] * 8)])
    (row,) = cheapest_layout(lengths, openings)
    assert [block.members for block in row] == [tuple(range(8))]
    lengths, openings = conversations([(2, [600] * 2)])
    assert len(cheapest_layout(lengths, openings)) == 2, "a row of 1,202 tokens costs more than two of 602"


def largest(split, lengths, openings):
    """Tokens of the largest micro-batch."""
    layouts = (
        cheapest_layout([lengths[i] for i in part], None if openings is None else [openings[i] for i in part])
        for part in split
        if part
    )
    return max(map(room, layouts))


@given(families=FAMILIES, parts=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_micro_batches_hold_every_conversation_once_in_order(families, parts):
    lengths, openings = conversations(families)
    split = micro_batches_of(lengths, parts, openings)
    assert len(split) == parts
    assert sorted(index for part in split for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in split)
    apart = balanced_parts(lengths, parts)
    assert micro_batches_of(lengths, parts, None) == apart
    assert largest(split, lengths, openings) <= largest(apart, lengths, None)


def test_families_stay_together_unless_a_micro_batch_would_grow():
    lengths, openings = conversations([(40, [60] * 8)] * 4)
    openings = [Opening(index // 8, 40) for index in range(32)]
    assert micro_batches_of(lengths, 4, openings) == [list(range(8 * i, 8 * i + 8)) for i in range(4)]
    split = micro_batches_of(lengths[:16], 4, openings[:16])
    assert [len(part) for part in split] == [4] * 4, "two families fill two of four micro-batches only"


def test_what_a_token_is_predicted_from_is_its_own_conversation_and_nothing_else():
    items = [*family(24, (9, 17, 1)), transcript(30, 4), *family(12, (5, 5), seed=1)]
    batch = packed(items, phase="demonstration", share=True)
    assert batch.spans is not None
    for place, item in enumerate(items):
        last = int(item.turns[-1, 1]) - 1
        assert context(batch, place).tolist() == item.token_ids[:last].tolist()
    positions = batch.position_ids.flatten()[batch.predicted_from]
    assert torch.equal(positions, torch.cat([item.sampled_positions() - 1 for item in items]))


def test_nothing_is_shared_where_nothing_is_alike_or_unless_it_is_asked_for():
    assert packed([trajectory(20, seed) for seed in range(3)], share=True).spans is None
    assert packed(family(24, (9, 17)), phase="demonstration").spans is None
