import pytest

from freshper_lightning.rollout.episode import Step


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_reward_that_is_not_finite_in_float32_is_an_error_of_the_environment(reward):
    with pytest.raises(ValueError, match="reward must be finite"):
        Step.read(reward, {})


def test_what_an_environment_does_not_say_has_a_default():
    assert Step.read(1, {}) == Step(1.0, valid=True, effective=True)
    assert Step.read(0.5, {"valid": False}) == Step(0.5, valid=False, effective=False)
