import pytest

from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.rollout.collector import EnvironmentConfig
from tests.loop import policy, replay_data, rollout_callback, trainer

WITHOUT_REWARD = EnvironmentConfig("tests/HashScore-v0", {"levels": 1})


def test_evaluation_plays_an_environment_of_its_own_on_the_same_engine(model_path, tmp_path):
    evaluation = EvaluationCallback(episodes=4, every_n_iterations=1, at_start=False, environment=WITHOUT_REWARD)
    rollout = rollout_callback()
    trainer(tmp_path, rollout=rollout, evaluation=evaluation).fit(policy(model_path), datamodule=replay_data())
    scalars = read_scalars(tmp_path / "run")
    assert all(value > 0 for _, value in scalars["rollout/return"])
    for mode in ("sampled", "greedy"):
        assert [value for _, value in scalars[f"evaluation/{mode}/return"]] == [0.0, 0.0]
    evaluated = [step for step, _ in scalars["evaluation/sampled/return"]]
    assert [step for step, _ in scalars["time/sync"]] == [0, *evaluated]


@pytest.mark.parametrize("key", ["rollout", "evaluation"])
def test_an_environment_that_cannot_be_made_is_refused_before_the_model_is_loaded(model_path, tmp_path, key):
    broken = EnvironmentConfig("freshper/MathQuestion-v0", {"path": "nowhere.jsonl"})
    module = policy(model_path)
    run = trainer(
        tmp_path,
        rollout=rollout_callback(**({"environment": broken} if key == "rollout" else {})),
        evaluation=EvaluationCallback(episodes=2, environment=broken if key == "evaluation" else None),
    )
    with pytest.raises(ConfigurationError, match=rf"{key}\.environment: path='nowhere\.jsonl' is not a file"):
        run.fit(module, datamodule=replay_data())
    assert module.net is None
