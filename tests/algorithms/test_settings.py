import dataclasses
import math
import re

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from freshper_lightning.algorithms import GRPO, GSPO, PPO, SFT, Algorithm, DrGRPO, ESSGuard, Reinforce

IS = "importance_sampling"


def test_needs_follow_from_the_coefficients():
    assert (Reinforce.needs_rollouts, SFT.needs_rollouts) == (True, False)
    assert [algorithm.needs_critic() for algorithm in (Reinforce(), SFT(), PPO())] == [False, False, True]
    assert [algorithm.value_bound() for algorithm in (GRPO(), PPO(), PPO(value_clip=0.2))] == [None, None, 0.2]
    assert not Reinforce().needs_reference()
    assert not Reinforce().needs_entropy()
    assert Reinforce(kl_coefficient=0.1).needs_reference()
    assert not Reinforce(kl_coefficient=0.1).needs_reference_at_collection()
    in_reward = Reinforce(kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")
    assert (in_reward.needs_reference(), in_reward.needs_reference_at_collection()) == (False, True)
    assert [Reinforce(correction=c).needs_proximal() for c in ("bypass", "decoupled", IS)] == [False, True, False]
    assert Reinforce(entropy_coefficient=0.1).needs_entropy()
    assert not SFT().needs_reference()
    assert not SFT().needs_entropy()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"baseline": "median"}, "baseline must be one of none, mean, mean_std, leave_one_out, not 'median'"),
        ({"whiten": "no"}, "whiten must be one of True, False, not 'no'"),
        ({"correction": "both"}, "correction must be one of bypass, decoupled, importance_sampling, not 'both'"),
        (
            {"aggregation": "sum"},
            "aggregation must be one of token_mean, sequence_mean, sequence_sum, constant, not 'sum'",
        ),
        ({"advantage_clip": 0.0}, "advantage_clip must be above 0 and finite, not 0.0"),
        ({"group_filter": -1.0}, "group_filter must be at least 0 and finite, not -1.0"),
        ({"clip": 0.0}, "clip must be above 0 and at most 1, not 0.0"),
        ({"clip": 1.1}, "clip must be above 0 and at most 1, not 1.1"),
        ({"clip": math.nan}, "clip must be above 0 and at most 1, not nan"),
        ({"clip_high": -0.1}, "clip_high must be above 0 and finite, not -0.1"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1 and finite, not 1.0"),
        ({"second_moment": 0.0}, "second_moment must be above 0 and finite, not 0.0"),
        ({"weight_cap": 0.5}, "weight_cap must be at least 1 and finite, not 0.5"),
        ({"weight_cap": math.inf}, "weight_cap must be at least 1 and finite, not inf"),
        ({"weight_floor": 1.5}, "weight_floor must be at least 0 and at most 1, not 1.5"),
        ({"negative_mask": -0.1}, "negative_mask must be at least 0 and finite, not -0.1"),
        ({"entropy_coefficient": -1.0}, "entropy_coefficient must be at least 0 and finite, not -1.0"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be at least 0 and finite, not -1.0"),
        ({"level": "turn"}, "level must be one of token, sequence, geometric, not 'turn'"),
        ({"correction": IS, "dual_clip": 3.0}, f"dual_clip is 3.0, but correction '{IS}' allows only null"),
        ({"correction": IS, "clip_high": 0.3}, f"clip_high is 0.3, but correction '{IS}' allows only null"),
        ({"correction": IS, "surrogate": "cispo"}, f"surrogate is cispo, but correction '{IS}' allows only clip"),
        ({"weight_cap": 5.0}, "weight_cap is 5.0, but correction 'bypass' allows only 2.0"),
        ({"weight_bound": "mask"}, "weight_bound is mask, but correction 'bypass' allows only truncate"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "dual_clip is 3.0, but surrogate 'cispo' allows only null"),
        ({"surrogate": "second_moment", "clip": 0.1}, "clip is 0.1, but surrogate 'second_moment' allows only 0.2"),
        (
            {"surrogate": "second_moment", "level": "geometric"},
            "level is geometric, but surrogate 'second_moment' allows only token",
        ),
        ({"second_moment": 0.1}, "second_moment is 0.1, but surrogate 'clip' allows only 0.04"),
        (
            {"correction": IS, "weight_floor": 0.5},
            "weight_floor is 0.5, but weight_bound 'truncate' allows only 0.0",
        ),
        (
            {"aggregation": "constant"},
            "aggregation_length must be above 0 and finite with aggregation 'constant', not None",
        ),
        ({"aggregation_length": 64.0}, "aggregation_length is 64.0, but aggregation 'token_mean' allows only null"),
        ({"kl_estimator": "k1"}, "kl_estimator must be k2 or k3 where kl_in is 'loss', not 'k1'"),
        ({"kl_in": "reward"}, "kl_estimator must be k1 where kl_in is 'reward', not 'k3'"),
        (
            {"kl_in": "reward", "kl_estimator": "k1", "kl_ratio": False},
            "kl_ratio is False, but kl_in 'reward' allows only True",
        ),
        ({"kl_estimator": "k2"}, "kl_estimator is k2, but kl_coefficient 0.0 allows only k3"),
        ({"kl_ratio": False}, "kl_ratio is False, but kl_coefficient 0.0 allows only True"),
        ({"kl_in": "reward", "kl_estimator": "k1"}, "kl_in is reward, but kl_coefficient 0.0 allows only loss"),
    ],
)
@pytest.mark.parametrize("algorithm", [Reinforce, GRPO])
def test_a_setting_out_of_range_is_refused_by_name(algorithm, setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        algorithm(**setting)


def test_supervised_learning_refuses_an_unknown_aggregation():
    with pytest.raises(ValueError, match="aggregation must be one of"):
        SFT(aggregation="sum")


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Reinforce().clip = 0.1


class Owner:
    """Has an algorithm, as the Lightning module does."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm


def parsed(*arguments: str) -> Algorithm:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Owner, "model")
    return parser.instantiate(
        parser.parse_args([f"--model.algorithm{argument}" for argument in arguments])
    ).model.algorithm


def test_a_config_names_an_algorithm_by_its_short_class_name():
    assert parsed("=GRPO", ".clip=0.1", ".dual_clip=3") == GRPO(clip=0.1, dual_clip=3.0)
    assert parsed("=Reinforce", f".correction={IS}") == Reinforce(correction=IS)
    assert parsed("=GSPO", ".clip=0.01") == GSPO(clip=0.01)
    assert parsed("=DrGRPO", ".aggregation_length=512") == DrGRPO(aggregation_length=512.0)
    assert parsed("=SFT") == SFT()


def test_a_config_with_a_wrong_key_or_value_is_refused():
    with pytest.raises(ArgumentError, match="'clipp' is not accepted"):
        parsed("=GRPO", ".clipp=0.1")
    with pytest.raises(ArgumentError, match="'none', 'mean', 'mean_std'"):
        parsed("=GRPO", ".baseline=median")
    with pytest.raises(ValueError, match="clip must be above 0 and at most 1, not 2"):
        parsed("=GRPO", ".clip=2")


def test_a_preset_with_a_correction_that_ignores_its_settings_is_refused():
    with pytest.raises(ValueError, match=rf"level is geometric, but correction '{IS}' allows only token"):
        GSPO(correction=IS)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ess_token": 0.0}, "ess_token must be above 0 and at most 1, not 0.0"),
        ({"ess_sequence": 1.5}, "ess_sequence must be above 0 and at most 1, not 1.5"),
        ({"ess_token": 0.5, "ess_sequence": 0.3}, "ess_token is 0.5, but ess_sequence 0.3 allows only null"),
        ({"action": "skip"}, "action is skip, but without ess_token or ess_sequence it allows only scale"),
        ({"action": "stop"}, "action must be one of scale, skip, not 'stop'"),
    ],
)
def test_a_guard_out_of_range_is_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ESSGuard(**setting)
