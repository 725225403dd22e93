import functools
import math
import operator

import numpy as np
import pytest
import torch

from freshper_lightning.replay import (
    AbsoluteAdvantage,
    AbsoluteReward,
    CustomPriority,
    GroupSpread,
    Learnability,
    PositiveReward,
    TDError,
    UniformPriority,
)
from tests.replay.builders import START, make_buffer, make_trajectory


def test_uniform_priority_ignores_the_trajectory():
    assert UniformPriority().base(make_trajectory(rewards=(-7.0,))) == 1.0


@pytest.mark.parametrize(("rewards", "expected"), [((0.5, 1.0), 1.5), ((-3.0, 1.0), 2.0), ((1.0, -1.0), 0.0)])
def test_absolute_reward_is_the_magnitude_of_the_return(rewards, expected):
    assert AbsoluteReward(eps=0.0).base(make_trajectory(rewards=rewards)) == expected
    assert AbsoluteReward().base(make_trajectory(rewards=rewards)) == expected + 1e-6


def test_absolute_reward_excludes_the_format_penalty():
    clean, penalised = make_trajectory(), make_trajectory(format_penalty=-0.5, invalid_turns=3)
    assert AbsoluteReward().base(penalised) == AbsoluteReward().base(clean)


def test_absolute_advantage_is_the_mean_over_sampled_tokens():
    item = make_trajectory(rewards=(0.0, 0.0), turn_tokens=(1, 3), advantages=(2.0, -0.5))
    assert AbsoluteAdvantage(eps=0.0).base(item) == pytest.approx((1 * 2.0 + 3 * 0.5) / 4, rel=1e-15)
    assert AbsoluteAdvantage(eps=0.25).base(item) == pytest.approx(0.875 + 0.25, rel=1e-15)


def test_absolute_advantages_of_many_are_those_of_each_to_the_bit():
    items = [
        make_trajectory((0.0,) * n, tuple(range(1, n + 1)), tuple(torch.randn(n).tolist())) for n in (1, 10, 3, 17)
    ]
    expected = []
    for item in items:
        tokens = [end - start for start, end in item.turns.tolist()]
        terms = [count * abs(advantage) for count, advantage in zip(tokens, item.advantages.tolist(), strict=True)]
        expected.append(functools.reduce(operator.add, terms) / sum(tokens) + 1e-6)
    assert AbsoluteAdvantage().bases(items).tolist() == expected
    assert [AbsoluteAdvantage().base(item) for item in items] == expected
    assert AbsoluteAdvantage().bases([]).shape == (0,)


class Doubled(AbsoluteAdvantage):
    def base(self, trajectory):
        return 2 * super().base(trajectory)


def test_a_subclass_says_what_each_of_many_is_worth():
    item = make_trajectory(advantages=(1.5,))
    assert Doubled(eps=0.0).bases([item, item]).tolist() == [3.0, 3.0]


def test_absolute_advantage_without_advantages_is_an_error():
    with pytest.raises(ValueError, match="no advantages"):
        AbsoluteAdvantage().base(make_trajectory())


def test_td_error_without_a_critic_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="needs a critic"):
        TDError().base(make_trajectory())


def test_measured_td_errors_become_the_mean_magnitude():
    assert TDError(eps=0.5).measured(torch.tensor([1.0, -3.0])) == 2.5


def test_positive_reward_is_eps_for_a_failure_and_the_return_otherwise():
    assert PositiveReward(eps=0.5).base(make_trajectory(rewards=(1.0, -3.0))) == 0.5
    assert PositiveReward(eps=0.5).base(make_trajectory(rewards=(1.0, 2.0))) == 3.5
    with pytest.raises(ValueError, match="must be finite"):
        make_buffer(priority=PositiveReward()).add([make_trajectory(rewards=(math.nan,))], START)


def test_group_spread_is_the_deviation_of_the_group():
    assert GroupSpread(eps=0.25).base(make_trajectory(group_std=1.5)) == 1.75


def test_group_spread_without_statistics_is_an_error():
    with pytest.raises(ValueError, match="needs the statistics of group 3"):
        GroupSpread().base(make_trajectory(group=3))


def of_prompt(*successes, seed=0, task="toy"):
    return [make_trajectory(success=success, seed=seed, task=task) for success in successes]


def test_learnability_follows_the_running_success_rate_of_the_prompt():
    buffer = make_buffer(priority=Learnability(eps=0.0))
    buffer.add([*of_prompt(True, False), *of_prompt(True, seed=1), *of_prompt(False, task="other")], START)
    assert buffer.probabilities(START).tolist() == [0.5, 0.5, 0, 0]
    buffer.add(of_prompt(True, True), START)
    assert buffer.probabilities(START)[[0, 4, 5]] == pytest.approx(np.array([4, 3, 3]) / 14, rel=1e-12)


def test_success_rates_are_part_of_the_state():
    buffer, restored = (make_buffer(priority=Learnability(), capacity=2) for _ in range(2))
    buffer.add(of_prompt(True, False), START)
    buffer.add(of_prompt(False, False, task="other"), START)
    restored.load_state_dict(buffer.state_dict())
    for each in (buffer, restored):
        each.add(of_prompt(True), START)
    assert restored.probabilities(START).tobytes() == buffer.probabilities(START).tobytes()
    assert restored.probabilities(START)[1] == pytest.approx((2 / 9 + 1e-6) / (2 / 9 + 2e-6), rel=1e-12)


def test_rates_of_the_prompts_met_longest_ago_are_forgotten_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr("freshper_lightning.replay.success.MOST_PROMPTS", 3)
    buffer, restored = (make_buffer(capacity=2, priority=Learnability(eps=0.0)) for _ in range(2))
    for seed in (0, 1, 2, 0, 3, 4):
        buffer.add([make_trajectory(seed=seed, success=True)], START)
    assert [seed for _, seed in buffer._rates._counts] == [0, 3, 4]
    restored.load_state_dict(buffer.state_dict())
    for each in (buffer, restored):
        ids = each.add([make_trajectory(seed=seed, success=False) for seed in (0, 5)], START)
        assert each.bases(ids).tolist() == pytest.approx([2 / 9, 0])
        assert [seed for _, seed in each._rates._counts] == [4, 0, 5]


def test_learnability_without_a_verdict_is_an_error_and_nothing_is_counted():
    buffer = make_buffer(priority=Learnability())
    with pytest.raises(ValueError, match="needs the environment's verdict"):
        buffer.add([*of_prompt(True), make_trajectory(success=None)], START)
    assert (len(buffer), len(buffer._rates)) == (0, 0)
    with pytest.raises(ValueError, match="only a replay buffer has"):
        Learnability().base(make_trajectory(success=True))


def test_learnability_counts_an_episode_that_was_cut_off_ahead_of_its_verdict_as_failed():
    buffer = make_buffer(priority=Learnability(eps=0.0))
    ids = buffer.add([make_trajectory(success=True), make_trajectory(success=None, truncated=True)], START)
    assert buffer.bases(ids).tolist() == pytest.approx([1 / 4, 1 / 4])


def number_of_turns(trajectory):
    return trajectory.num_turns


def test_a_function_can_be_named_by_its_path():
    priority = CustomPriority("tests.replay.test_priority.number_of_turns")
    assert priority.base(make_trajectory(rewards=(0.0, 0.0))) == 2.0
    assert priority == CustomPriority("tests.replay.test_priority.number_of_turns")
    assert repr(priority) == "CustomPriority(path='tests.replay.test_priority.number_of_turns')"


@pytest.mark.parametrize("path", ["nothing", "no.such.module", "math.nothing", "math.pi", ""])
def test_a_path_without_a_function_is_refused(path):
    with pytest.raises(ValueError, match="path must"):
        CustomPriority(path)


def test_measured_priorities_take_the_place_of_those_at_collection():
    buffer, priority = make_buffer(priority=TDError()), TDError()
    values = [priority.measured(torch.tensor([error])) for error in (1.0, -3.0)]
    buffer.add([make_trajectory(), make_trajectory()], START, priorities=values)
    assert buffer.probabilities(START) == pytest.approx([0.25, 0.75], rel=1e-5)
    for bad, message in (([1.0], "shape of priorities"), ([1.0, -1.0], "finite and at least 0")):
        with pytest.raises(ValueError, match=message):
            buffer.add([make_trajectory(), make_trajectory()], START, priorities=bad)
    assert len(buffer) == 2


def test_priorities_say_what_they_need_and_whether_training_rewrites_them():
    kinds = (
        UniformPriority,
        AbsoluteReward,
        PositiveReward,
        AbsoluteAdvantage,
        GroupSpread,
        Learnability,
        CustomPriority,
    )
    assert not any(kind.needs_critic or kind.rewritten for kind in kinds)
    assert TDError.needs_critic
    assert TDError.rewritten
    assert [kind for kind in (*kinds, TDError) if kind.needs_advantages] == [AbsoluteAdvantage]


@pytest.mark.parametrize(
    "kind", [AbsoluteReward, PositiveReward, AbsoluteAdvantage, GroupSpread, Learnability, TDError]
)
@pytest.mark.parametrize("eps", [-1e-9, math.nan, math.inf])
def test_a_bad_eps_is_refused(kind, eps):
    with pytest.raises(ValueError, match="eps must be"):
        kind(eps=eps)


def nothing(trajectory):
    return None


def test_a_function_that_returns_no_number_is_named():
    with pytest.raises(ValueError, match=r"test_priority\.nothing must return a number, not None"):
        make_buffer(priority=CustomPriority("tests.replay.test_priority.nothing")).add([make_trajectory()], START)


def test_bases_that_are_not_one_for_each_are_refused_before_anything_is_evicted():
    class Short(UniformPriority):
        def bases(self, trajectories):
            return super().bases(trajectories[:1])

    buffer = make_buffer(priority=Short(), capacity=2)
    for _ in range(2):
        buffer.add([make_trajectory()], START)
    with pytest.raises(ValueError, match=r"bases of .* one number for each of 2 trajectories, not \(1,\)"):
        buffer.add([make_trajectory(), make_trajectory()], START)
    assert buffer.ids().tolist() == [0, 1]
