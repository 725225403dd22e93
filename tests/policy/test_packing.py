import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.transcripts import alone, packed, statistics, trajectory, transcript

LENGTHS = [240, 66, 156, 42, 126, 72, 240, 30]


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
