import dataclasses
import math
import re

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from freshper_lightning.algorithms import GRPO, SFT, Algorithm, Reinforce


def test_needs_follow_from_the_coefficients():
    assert (Reinforce.needs_rollouts, SFT.needs_rollouts) == (True, False)
    assert not Reinforce().needs_critic
    assert not Reinforce().needs_reference()
    assert not Reinforce().needs_entropy()
    assert Reinforce(kl_coefficient=0.1).needs_reference()
    assert Reinforce(entropy_coefficient=0.1).needs_entropy()
    assert not SFT().needs_reference()
    assert not SFT().needs_entropy()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"baseline": "median"}, "baseline must be one of none, mean, mean_std, not 'median'"),
        ({"whiten": "no"}, "whiten must be one of True, False, not 'no'"),
        ({"correction": "both"}, "correction must be one of clip, truncate, not 'both'"),
        ({"aggregation": "sum"}, "aggregation must be one of token_mean, sequence_mean, sequence_sum, not 'sum'"),
        ({"advantage_clip": 0.0}, "advantage_clip must be above 0 and finite, not 0.0"),
        ({"clip": 0.0}, "clip must be above 0 and below 1, not 0.0"),
        ({"clip": 1.0}, "clip must be above 0 and below 1, not 1.0"),
        ({"clip": math.nan}, "clip must be above 0 and below 1, not nan"),
        ({"clip_high": -0.1}, "clip_high must be above 0 and finite, not -0.1"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1 and finite, not 1.0"),
        ({"truncation": 0.5}, "truncation must be at least 1 and finite, not 0.5"),
        ({"truncation": math.inf}, "truncation must be at least 1 and finite, not inf"),
        ({"entropy_coefficient": -1.0}, "entropy_coefficient must be at least 0 and finite, not -1.0"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be at least 0 and finite, not -1.0"),
        ({"correction": "truncate", "dual_clip": 3.0}, "dual_clip is 3.0, but correction 'truncate' allows only null"),
        ({"correction": "truncate", "clip_high": 0.3}, "clip_high is 0.3, but correction 'truncate' allows only null"),
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
    assert parsed("=Reinforce", ".correction=truncate") == Reinforce(correction="truncate")
    assert parsed("=SFT") == SFT()


def test_a_config_with_a_wrong_key_or_value_is_refused():
    with pytest.raises(ArgumentError, match="'clipp' is not accepted"):
        parsed("=GRPO", ".clipp=0.1")
    with pytest.raises(ArgumentError, match="'none', 'mean', 'mean_std'"):
        parsed("=GRPO", ".baseline=median")
    with pytest.raises(ValueError, match="clip must be above 0 and below 1, not 2"):
        parsed("=GRPO", ".clip=2")
