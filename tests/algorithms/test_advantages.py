import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freshper_lightning.algorithms import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    M2PO,
    MIS,
    PPO,
    RLOO,
    TIS,
    TOPR,
    DecoupledGRPO,
    DrGRPO,
    Reinforce,
    ReinforcePlusPlusBaseline,
)
from freshper_lightning.algorithms.advantages import (
    EPSILON,
    Reduce,
    compute_advantages,
    group_statistics,
    turn_weights,
    whitened,
)
from freshper_lightning.trajectory import Trajectory
from tests.algorithms.episodes import alone, episode


def advantages_of(trajectories, baseline="none", whiten=False, clip=None, reduce=alone) -> Tensor:
    result = compute_advantages(trajectories, reduce, baseline=baseline, whiten=whiten, clip=clip)
    return torch.cat([trajectory.advantages for trajectory in result])


def on_ranks(shards: list[list[Trajectory]], work: Callable[[list[Trajectory], Reduce], Tensor]) -> list[Tensor]:
    """Run ``work`` on one thread per shard, with a blocking sum over all of them."""
    barrier = threading.Barrier(len(shards), timeout=10)
    slots: list[Tensor] = [torch.empty(0)] * len(shards)
    results: list[Tensor] = [torch.empty(0)] * len(shards)

    def run(rank: int) -> None:
        def reduce(tensor: Tensor) -> Tensor:
            assert tensor.dtype == torch.float64
            slots[rank] = tensor.clone()
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        results[rank] = work(shards[rank], reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_no_baseline_leaves_score_plus_format_penalty():
    trajectories = [episode(0, 0, 1.0, penalty=-0.25), episode(0, 1, 0.0, penalty=-0.5)]
    assert advantages_of(trajectories).tolist() == [0.75, -0.5]


def test_mean_baseline_is_the_distance_to_the_group_mean():
    # Means: (1 + 0 + 0.5) / 3 = 0.5 and (4 + 1 + 1) / 3 = 2.
    scores = {0: (1.0, 0.0, 0.5), 1: (4.0, 1.0, 1.0)}
    trajectories = [episode(group, member, score) for group in scores for member, score in enumerate(scores[group])]
    torch.testing.assert_close(advantages_of(trajectories, "mean"), torch.tensor([0.5, -0.5, 0.0, 2.0, -1.0, -1.0]))


def test_mean_std_baseline_divides_by_the_biased_deviation_of_the_group():
    # Returns 1, 0, 0, 0: mean 1/4, biased variance (9 + 3 x 1) / 16 / 4 = 3/16, so 3/4 : sqrt(3)/4 = sqrt(3).
    trajectories = [episode(0, member, float(member == 0)) for member in range(4)]
    expected = torch.tensor([3**0.5, *[-(3**-0.5)] * 3])
    torch.testing.assert_close(advantages_of(trajectories, "mean_std"), expected, rtol=1e-5, atol=0)


def test_a_penalty_alone_does_not_become_an_advantage_of_full_size():
    # Group 0 has one outcome and penalties that differ a little; group 1 has outcomes 1 and 0, whose deviation is 1/2.
    scores = {0: (1.0, 1.0), 1: (1.0, 0.0)}
    trajectories = [episode(group, member, score) for group in scores for member, score in enumerate(scores[group])]

    def penalty(items):
        return torch.tensor([0.0, 2e-5, 0.0, 2e-5], dtype=torch.float64)

    for baseline, expected in (("mean_std", [0.0, 0.0, 1.0, -1.0]), ("mean", [1e-5, -1e-5, 0.5, -0.5])):
        kept = compute_advantages(trajectories, alone, baseline=baseline, whiten=False, clip=None, penalty=penalty)
        found = torch.cat([item.advantages for item in kept])
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=0)
        assert [item.group_std for item in kept] == [0.0, 0.0, 0.5, 0.5]


def test_leave_one_out_is_the_distance_to_the_mean_of_the_others():
    # Returns 1, 0, 0.5: 1 - 0.25, 0 - 0.75, 0.5 - 0.5.
    trajectories = [episode(0, member, score) for member, score in enumerate((1.0, 0.0, 0.5))]
    torch.testing.assert_close(advantages_of(trajectories, "leave_one_out"), torch.tensor([0.75, -0.75, 0.0]))


def test_groups_of_nearly_equal_outcomes_are_as_if_they_had_not_been_collected():
    # Group 1 deviates by 0.05 and group 2 by nothing. Without them, returns 1 and 0 are whitened to 1 and -1.
    scores = {0: (1.0, 0.0), 1: (5.0, 5.1), 2: (9.0, 9.0)}
    trajectories = [episode(group, member, score) for group in scores for member, score in enumerate(scores[group])]
    settings_of_all = {"baseline": "mean", "whiten": True, "clip": None}
    kept = compute_advantages(trajectories, alone, **settings_of_all, group_filter=0.06)
    assert [(item.group, item.member) for item in kept] == [(0, 0), (0, 1)]
    torch.testing.assert_close(torch.cat([item.advantages for item in kept]), torch.tensor([1.0, -1.0]))
    kept = compute_advantages(trajectories, alone, **settings_of_all, group_filter=0.0)
    assert {item.group for item in kept} == {0, 1}
    assert compute_advantages(trajectories[4:], alone, **settings_of_all, group_filter=0.0) == []


def test_the_filter_looks_at_outcomes_without_the_penalty():
    trajectories = [episode(0, 0, 1.0), episode(0, 1, 1.0), episode(1, 0, 0.0), episode(1, 1, 1.0)]

    def penalty(kept):
        return torch.arange(1.0, 1.0 + len(kept), dtype=torch.float64)

    kept = compute_advantages(
        trajectories, alone, baseline="none", whiten=False, clip=None, group_filter=1e-6, penalty=penalty
    )
    # Members of group 1 have the penalties 1 and 2: the filter comes first.
    assert [item.advantages.item() for item in kept] == [-1.0, -1.0]
    assert {item.group for item in kept} == {1}


def test_group_statistics_are_stored_with_every_member():
    trajectories = [episode(0, 0, 1.0, penalty=-0.5), episode(0, 1, 0.0), episode(1, 0, 3.0), episode(1, 1, 3.0)]
    result = compute_advantages(trajectories, alone, baseline="none", whiten=False, clip=None)
    assert [(item.group_mean, item.group_std) for item in result] == [(0.25, 0.25)] * 2 + [(3.0, 0.0)] * 2


def test_groups_are_told_apart_by_id_and_not_by_position():
    grouped = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(7, 0, 5.0), episode(7, 1, 9.0)]
    interleaved = [grouped[2], grouped[0], grouped[3], grouped[1]]
    assert advantages_of(grouped, "mean").tolist() == [0.5, -0.5, -2.0, 2.0]
    assert advantages_of(interleaved, "mean").tolist() == [-2.0, 0.5, 2.0, -0.5]


def test_every_turn_gets_the_advantage_of_its_episode():
    result = compute_advantages(
        [episode(0, 0, 1.0, (2, 1, 3)), episode(0, 1, 0.0, (4,))], alone, baseline="mean", whiten=False, clip=None
    )
    assert result[0].advantages.tolist() == [0.5, 0.5, 0.5]
    assert result[1].advantages.tolist() == [-0.5]
    assert result[0].token_advantages().tolist() == [0.5] * 6


@pytest.mark.parametrize("baseline", ["mean", "mean_std", "leave_one_out"])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("score", [0.0, 0.1, -3.7, 1e9])
def test_equal_returns_give_exactly_zero(baseline, whiten, score):
    trajectories = [episode(group, member, score) for group in range(2) for member in range(3)]
    assert advantages_of(trajectories, baseline, whiten).tolist() == [0.0] * 6


def test_whitening_equal_returns_without_a_baseline_gives_exactly_zero():
    trajectories = [episode(group, member, 0.1, (3, 2)) for group in range(2) for member in range(3)]
    assert advantages_of(trajectories, "none", whiten=True).tolist() == [0.0] * 12


def test_rounding_noise_inside_a_group_is_not_blown_up():
    trajectories = [episode(0, 0, 0.1, penalty=0.0), episode(0, 1, 0.3, penalty=-0.2)]
    assert trajectories[0].training_return != trajectories[1].training_return
    assert advantages_of(trajectories, "mean_std").tolist() == [0.0, 0.0]


def test_one_float32_step_of_a_large_return_is_rounding_noise():
    # Neighbours of 1e6 in float32 are 1/16 apart: far above an absolute 1e-6, and still nothing but rounding.
    trajectories = [episode(0, 0, 1e6), episode(0, 1, 1e6 + 0.0625)]
    assert trajectories[0].training_return != trajectories[1].training_return
    assert advantages_of(trajectories, "mean_std").tolist() == [0.0, 0.0]


def test_whitening_weighs_a_turn_by_its_sampled_tokens():
    # Returns 1 on 3 tokens and 0 on 1 token: mean 3/4, variance 3/4 x 1/4 = 3/16, deviation sqrt(3)/4.
    trajectories = [episode(0, 0, 1.0, (1, 2)), episode(0, 1, 0.0, (1,))]
    expected = torch.tensor([3**-0.5, 3**-0.5, -(3**0.5)])
    torch.testing.assert_close(advantages_of(trajectories, whiten=True), expected, rtol=1e-5, atol=0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(1, 5)), min_size=2, max_size=12))
def test_whitened_tokens_have_mean_zero_and_variance_one_or_are_all_zero(draws):
    trajectories = [episode(0, member, score, (length,)) for member, (score, length) in enumerate(draws)]
    weights = turn_weights(trajectories)
    values = torch.tensor([trajectory.training_return for trajectory in trajectories], dtype=torch.float64)
    result = whitened(values, weights, alone)
    mean = weights @ result / weights.sum()
    variance = weights @ (result - mean).square() / weights.sum()
    assert abs(mean) < 1e-9
    deviation = float(values.repeat_interleave(weights.long()).std(correction=0))
    assert float(variance) == pytest.approx((deviation / (deviation + EPSILON)) ** 2, abs=1e-9) or not result.any()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
    st.sampled_from([(2, 2), (1, 3), (0, 4), (1, 2, 1)]),
    st.sampled_from(["none", "mean", "mean_std", "leave_one_out"]),
)
def test_ranks_together_compute_what_one_process_computes(scores, lengths, groups_per_rank, baseline):
    trajectories = [
        episode(index // 3, index % 3, score, (length, 1))
        for index, (score, length) in enumerate(zip(scores, lengths, strict=True))
    ]
    borders = [0, *torch.tensor(groups_per_rank).mul(3).cumsum(0).tolist()]
    shards = [trajectories[low:high] for low, high in pairwise(borders)]

    def work(shard: list[Trajectory], reduce: Reduce) -> Tensor:
        result = compute_advantages(shard, reduce, baseline=baseline, whiten=True, clip=None)
        return torch.cat([torch.empty(0), *[trajectory.advantages for trajectory in result]])

    together = torch.cat(on_ranks(shards, work))
    torch.testing.assert_close(together, advantages_of(trajectories, baseline, whiten=True), rtol=1e-6, atol=1e-6)


def test_whitening_is_exact_for_a_large_common_offset():
    values = torch.tensor([1e8, 1e8 + 1000.0], dtype=torch.float64)
    result = whitened(values, torch.ones(2, dtype=torch.float64), alone)
    torch.testing.assert_close(result, torch.tensor([-1.0, 1.0], dtype=torch.float64), rtol=1e-8, atol=0)


def test_baseline_comes_before_whitening_and_whitening_before_the_clip():
    # Returns 1, 0 give +1, -1 (mean_std). On 2 tokens and 1 the mean is 1/3 and the variance 1 - 1/9 = 8/9, so that the
    # values are 2/3 and -4/3 over sqrt(8)/3; the clip bounds the second.
    trajectories = [episode(0, 0, 1.0, (2,)), episode(0, 1, 0.0)]
    expected = torch.tensor([2.0, -4.0]) / 8**0.5
    result = advantages_of(trajectories, "mean_std", whiten=True)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    clipped = advantages_of(trajectories, "mean_std", whiten=True, clip=0.9)
    torch.testing.assert_close(clipped, expected.clamp(-0.9, 0.9), rtol=1e-5, atol=1e-6)
    assert clipped[1] == pytest.approx(-0.9)


@pytest.mark.parametrize("baseline", ["mean", "mean_std", "leave_one_out"])
def test_a_group_of_equal_outcomes_stays_at_zero_and_out_of_the_moments_of_whitening(baseline):
    # Group 0 is at +c, -c on 2 and 8 tokens: mean -6c/10, variance c^2 - (6c/10)^2, deviation 8c/10; so 2 and -1/2.
    # With the 6 tokens of group 1 at 0 the mean would be -6c/16, and these tokens would move by it.
    trajectories = [
        *(episode(0, 0, 1.0, (2,)), episode(0, 1, 0.0, (5, 3))),
        *(episode(1, 0, 1.0, (3,)), episode(1, 1, 1.0, (1, 2))),
        # Rounding only: 0.3 - 0.2 is not 0.1 in floating point.
        *(episode(2, 0, 0.1), episode(2, 1, 0.3, penalty=-0.2)),
    ]
    result = advantages_of(trajectories, baseline, whiten=True)
    torch.testing.assert_close(result[:3], torch.tensor([2.0, -0.5, -0.5]), rtol=1e-5, atol=0)
    assert result[3:].tolist() == [0.0] * 5


def test_without_a_baseline_a_group_of_equal_outcomes_is_whitened_like_any_other():
    # Returns 1, 0, 1, 1: mean 3/4, deviation sqrt(3)/4.
    trajectories = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(1, 0, 1.0), episode(1, 1, 1.0)]
    expected = torch.tensor([1.0, -3.0, 1.0, 1.0]) / 3**0.5
    torch.testing.assert_close(advantages_of(trajectories, "none", whiten=True), expected, rtol=1e-5, atol=0)


def test_order_of_trajectories_does_not_matter():
    trajectories = [episode(index // 4, index % 4, float(index % 3), (1 + index % 2, 2)) for index in range(12)]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    kwargs = {"baseline": "mean_std", "whiten": True, "clip": None}
    straight = compute_advantages(trajectories, alone, **kwargs)
    shuffled = compute_advantages([trajectories[index] for index in order], alone, **kwargs)
    for position, index in enumerate(order):
        torch.testing.assert_close(shuffled[position].advantages, straight[index].advantages)


def test_no_trajectories_still_take_part_in_the_collectives():
    calls = []

    def reduce(tensor: Tensor) -> Tensor:
        calls.append(tuple(tensor.shape))
        return tensor

    assert compute_advantages([], reduce, baseline="mean", whiten=True, clip=1.0) == []
    assert calls == [(), (2,), ()]


def test_without_whitening_ranks_agree_on_their_groups_and_on_nothing_else():
    calls = []

    def reduce(tensor: Tensor) -> Tensor:
        calls.append(tensor.tolist())
        return tensor

    assert advantages_of([episode(0, 0, 1.0), episode(0, 1, 0.0)], "mean", reduce=reduce).tolist() == [0.5, -0.5]
    assert calls == [0.0]


@pytest.mark.parametrize("algorithm", [Reinforce(), PPO()])
def test_what_one_rank_refuses_stops_all_of_them(algorithm):
    messages = {}

    def work(shard: list[Trajectory], reduce: Reduce) -> Tensor:
        with pytest.raises(ValueError, match=r"finite|another rank") as caught:
            algorithm.advantages(shard, reduce)
        messages[shard[0].group] = str(caught.value)
        return torch.empty(0)

    broken = [episode(0, 0, 1.0), episode(0, 1, float("nan"))]
    on_ranks([broken, [episode(1, 0, 1.0), episode(1, 1, 0.0)]], work)
    assert messages == {
        0: "member 1 of group 0 has the training return nan, which is not finite",
        1: "the groups of another rank are refused; its own error says why",
    }


def test_an_incomplete_group_is_refused():
    trajectories = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(4, 0, 1.0)]
    with pytest.raises(ValueError, match="group 0 has 2 members and group 4 has 1"):
        advantages_of(trajectories, "mean")


def test_a_member_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match=r"group 3 holds a member twice: \[1, 1\]"):
        advantages_of([episode(3, 1, 1.0), episode(3, 1, 0.0)], "mean")


@pytest.mark.parametrize("baseline", ["mean", "mean_std", "leave_one_out"])
def test_groups_of_one_are_refused_where_the_baseline_would_cancel_them(baseline):
    trajectories = [episode(0, 0, 1.0), episode(1, 0, 0.0)]
    with pytest.raises(ValueError, match="groups of at least 2 members"):
        advantages_of(trajectories, baseline)
    assert advantages_of(trajectories, "none").tolist() == [1.0, 0.0]


def test_advantages_are_never_recomputed():
    frozen = compute_advantages(
        [episode(0, 0, 1.0), episode(0, 1, 0.0)], alone, baseline="mean", whiten=False, clip=None
    )
    with pytest.raises(ValueError, match="member 0 of group 0 has its advantages already"):
        advantages_of(frozen, "mean")


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_return_that_is_not_finite_is_refused(score):
    with pytest.raises(ValueError, match="member 1 of group 0 has the training return"):
        advantages_of([episode(0, 0, 1.0), episode(0, 1, score)], "mean")


def test_everything_else_in_the_trajectory_is_kept():
    source = replace(episode(2, 0, 1.0, (2, 3)), success=True, images=(b"x",))
    result = compute_advantages([source, episode(2, 1, 0.0)], alone, baseline="mean", whiten=False, clip=None)[0]
    assert result.token_ids is source.token_ids
    assert (result.success, result.images, result.group) == (True, (b"x",), 2)
    assert result.advantages.dtype == torch.float32
    assert source.advantages is None


def test_group_statistics_agree_with_one_group_at_a_time():
    generator = torch.Generator().manual_seed(1)
    returns = torch.randn(20, generator=generator, dtype=torch.float64)
    groups = torch.randint(-3, 3, (20,), generator=generator)
    mean, std = group_statistics(returns, groups)
    for index, group in enumerate(groups):
        members = returns[groups == group]
        torch.testing.assert_close(mean[index], members.mean())
        torch.testing.assert_close(std[index], members.std(correction=0))


# Returns 1 and 0 in a group of 3 and 1 sampled tokens, 2 and 2 in a group of 2 and 2. Group means are 1/2 and 2, the
# deviation of the first is 1/2. Whitening centres the advantages of the first group at (3 x 1/2 - 1/2) / 4 = 1/4 with
# variance (3/16 + 9/16) / 4 = 3/16, and without a baseline all returns at 11/8 with variance 31/64.
BY_GROUP = [1.0, -1.0, 0.0, 0.0]
WHITENED = [3**-0.5, -(3**0.5), 0.0, 0.0]
PUBLISHED = {
    "REINFORCE++": (Reinforce(), [-3 / 31**0.5, -11 / 31**0.5, 5 / 31**0.5, 5 / 31**0.5]),
    "REINFORCE++-baseline": (ReinforcePlusPlusBaseline(), WHITENED),
    "FreshPER": (Reinforce(baseline="mean_std", advantage_clip=0.2), [0.2, -0.2, 0.0, 0.0]),
    "GRPO": (GRPO(), BY_GROUP),
    "DAPO": (DAPO(), BY_GROUP[:2]),
    "Dr. GRPO": (DrGRPO(aggregation_length=4), [0.5, -0.5, 0.0, 0.0]),
    "RLOO": (RLOO(), BY_GROUP),
    "TOPR": (TOPR(), [1.0, 0.0, 2.0, 2.0]),
    **{kind.__name__: (kind(), BY_GROUP) for kind in (GSPO, CISPO, M2PO, DecoupledGRPO, TIS, MIS)},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_preset_has_the_advantages_of_its_paper(name):
    algorithm, expected = PUBLISHED[name]
    outcomes = [(0, 0, 1.0, 3), (0, 1, 0.0, 1), (1, 0, 2.0, 2), (1, 1, 2.0, 2)]
    items = [episode(group, member, score, lengths=(tokens,)) for group, member, score, tokens in outcomes]
    found = torch.cat([item.advantages for item in algorithm.advantages(items, alone)])
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
