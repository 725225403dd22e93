import math

import pytest
import torch

from freshper_lightning.replay import AbsoluteAdvantage, AbsoluteReward, TDError, UniformPriority
from tests.replay.builders import make_trajectory


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


def test_absolute_advantage_without_advantages_is_an_error():
    with pytest.raises(ValueError, match="no advantages"):
        AbsoluteAdvantage().base(make_trajectory())


def test_td_error_without_a_critic_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="needs a critic"):
        TDError().base(make_trajectory())


def test_measured_td_errors_become_the_mean_magnitude():
    assert TDError(eps=0.5).measured(torch.tensor([1.0, -3.0])) == 2.5


def test_priorities_say_what_they_need():
    kinds = (UniformPriority, AbsoluteReward, AbsoluteAdvantage, TDError)
    assert [kind.needs_critic for kind in kinds] == [False, False, False, True]
    assert [kind.rewritten for kind in kinds] == [False, False, False, True]


@pytest.mark.parametrize("kind", [AbsoluteReward, AbsoluteAdvantage, TDError])
@pytest.mark.parametrize("eps", [-1e-9, math.nan, math.inf])
def test_a_bad_eps_is_refused(kind, eps):
    with pytest.raises(ValueError, match="eps must be"):
        kind(eps=eps)
