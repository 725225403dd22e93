import re

import gymnasium
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.callbacks.rollout import RolloutCallback, summarize
from freshper_lightning.rollout.collector import Collection, Collector, EnvironmentConfig
from freshper_lightning.rollout.seeds import training_instance_seed
from tests.loop import HashScore, fit, policy, replay_data, rollout_callback, trainer
from tests.replay.builders import make_trajectory


@pytest.fixture
def played(monkeypatch):
    """Every collection of the test: plans, temperature and trajectories."""
    seen, collect = [], Collector.collect

    def listen(self, plans, born, temperature=None, progress=None):
        collection = collect(self, plans, born, temperature, progress)
        seen.append((plans, temperature, collection.trajectories))
        return collection

    monkeypatch.setattr(Collector, "collect", listen)
    return seen


def evaluations(played, kind=()):
    return [one for one in played if len(one[0][0].sampling_key) == 2 and (not kind or one[1] in kind)]


def test_instances_are_the_same_for_every_run_and_none_is_trained_on(tmp_path, model_path, played):
    for seed in (3, 4):
        options = {"rollout": rollout_callback(seed=seed), "evaluation": EvaluationCallback(episodes=8)}
        fit(tmp_path / str(seed), policy(model_path), replay_data(seed=seed), **options)
    seeds = [[plan.instance_seed for plan in plans] for plans, _, _ in evaluations(played)]
    assert len(seeds) == 2 * 2 * 2
    assert all(one == seeds[0] for one in seeds)
    assert len(set(seeds[0])) == 8
    trained = {plan.instance_seed for plans, _, _ in played for plan in plans if len(plan.sampling_key) == 4}
    assert len(trained) == 8
    assert trained.isdisjoint(seeds[0])
    assert all(seed % 2 for seed in seeds[0])
    assert not any(training_instance_seed(run, i, g) % 2 for run in range(20) for i in range(20) for g in range(20))


def test_another_set_of_instances_has_another_name(tmp_path, model_path, played):
    for name in (0, 1):
        evaluation = EvaluationCallback(episodes=4, instances=name, modes=["greedy"])
        trainer(tmp_path / str(name), evaluation=evaluation).validate(policy(model_path), datamodule=replay_data())
    one, other = ({plan.instance_seed for plan in plans} for plans, _, _ in played)
    assert one.isdisjoint(other)


def test_one_policy_always_gets_one_result(tmp_path, model_path):
    """Neither the run's seed nor global random state has a say."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        evaluation = EvaluationCallback(episodes=16)
        run = trainer(tmp_path / str(seed), evaluation=evaluation, rollout=rollout_callback(seed=seed))
        run.validate(policy(model_path), datamodule=replay_data())
        results.append(evaluation.latest)
    assert results[0] == results[1]
    assert results[0]["evaluation/sampled/return"] != results[0]["evaluation/greedy/return"]


def test_metrics_are_means_over_the_episodes_that_were_played(tmp_path, model_path, played):
    evaluation = EvaluationCallback(episodes=6, modes=["sampled"])
    trainer(tmp_path, evaluation=evaluation).validate(policy(model_path), datamodule=replay_data())
    ((plans, temperature, items),) = played
    assert (len(plans), temperature) == (6, None)
    turns = sum(item.num_turns for item in items)
    assert evaluation.latest == {
        "evaluation/sampled/return": pytest.approx(sum(item.episode_return for item in items) / 6),
        "evaluation/sampled/success": pytest.approx(sum(item.success for item in items) / 6),
        "evaluation/sampled/turns": turns / 6,
        "evaluation/sampled/valid_actions": pytest.approx(1 - sum(item.invalid_turns for item in items) / turns),
        "evaluation/sampled/failures": 0.0,
    }


def test_an_episode_that_was_cut_off_ahead_of_its_verdict_has_failed():
    verdicts = [(True, False), (False, False), (None, True), (None, True)]
    items = [make_trajectory(success=success, truncated=truncated) for success, truncated in verdicts]
    assert summarize(Collection(items), lambda sums: sums)["success"] == 0.25
    assert "success" not in summarize(Collection(items[2:]), lambda sums: sums)


class Measuring(HashScore):
    """Measures its turns in the last step; instances of every second seed measure something else as well."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            info["scores"] = {"half_turns": self.turn / 2} | ({"rare": 1} if self.seed_of_instance % 4 == 1 else {})
        return observation, reward, terminated, truncated, info


gymnasium.register("tests/Measuring-v0", entry_point=Measuring)


def test_what_an_environment_measures_is_reported_as_the_mean_of_the_episodes_that_have_it(
    tmp_path, model_path, played
):
    measuring = EnvironmentConfig("tests/Measuring-v0")
    evaluation = EvaluationCallback(episodes=8, modes=["greedy"], environment=measuring)
    trainer(tmp_path, evaluation=evaluation).validate(policy(model_path), datamodule=replay_data())
    turns = [item.num_turns for _, _, items in played for item in items]
    assert evaluation.latest["evaluation/greedy/half_turns"] == pytest.approx(sum(turns) / 16)
    assert evaluation.latest["evaluation/greedy/rare"] == 1.0


def test_greedy_play_takes_the_most_likely_tokens(tmp_path, model_path, played):
    evaluation = EvaluationCallback(episodes=2, modes=["greedy"])
    module = policy(model_path)
    trainer(tmp_path, evaluation=evaluation).validate(module, datamodule=replay_data())
    ((_, temperature, items),) = played
    assert temperature == 0
    for item in items:
        logits = module.policy.model(item.token_ids[None].long()).logits[0]
        positions = item.sampled_positions()
        assert item.token_ids[positions].tolist() == logits[positions - 1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"at_start": True, "every_n_iterations": 2}, [0, 12, 18]),
        ({"at_start": False, "every_n_iterations": 1}, [6, 12, 18]),
        ({"at_start": False}, [18]),
    ],
)
def test_fit_evaluates_when_it_is_due_and_always_at_the_end(tmp_path, model_path, fields, steps):
    evaluation = EvaluationCallback(episodes=2, **fields)
    run = fit(tmp_path, policy(model_path), replay_data(), iterations=3, evaluation=evaluation)
    scalars = read_scalars(run.log_dir)
    for tag in (tag for tag in scalars if tag.startswith("evaluation/")):
        assert [step for step, _ in scalars[tag]] == steps, tag
    assert bool(evaluation.first) == fields["at_start"]
    last = scalars["evaluation/sampled/return"][-1][1]
    assert evaluation.latest["evaluation/sampled/return"] == pytest.approx(last)


def test_evaluation_costs_no_environment_steps_and_changes_no_training(tmp_path, model_path):
    runs = []
    for name, evaluation in {
        "with": EvaluationCallback(episodes=4, every_n_iterations=1),
        "without": EvaluationCallback(episodes=1, at_start=False, modes=["greedy"]),
    }.items():
        module = policy(model_path)
        run = fit(tmp_path / name, module, replay_data(), iterations=2, evaluation=evaluation)
        runs.append((callback_of(run, RolloutCallback).environment_steps, [p.detach() for p in module.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"episodes": 0}, r"evaluation\.episodes=0 must be at least 1"),
        ({"every_n_iterations": 0}, r"evaluation\.every_n_iterations=0 must be at least 1, or null"),
        ({"modes": []}, r"evaluation\.modes=\[\] must be a list of sampled, greedy"),
        ({"modes": ["fast"]}, r"evaluation\.modes=\['fast'\] must be a list of sampled, greedy"),
    ],
)
def test_an_impossible_setting_is_refused_by_key(fields, message):
    with pytest.raises(ValueError, match=message):
        EvaluationCallback(**fields)


def test_a_callback_that_waits_for_a_metric_which_there_is_not_is_named_with_those_that_there_are(
    tmp_path, model_path, caplog
):
    stops = [EarlyStopping(f"evaluation/sampled/{name}", mode="max", strict=False) for name in ("sucess", "success")]
    evaluation = EvaluationCallback(episodes=4, every_n_iterations=1)
    fit(tmp_path, policy(model_path), replay_data(), evaluation=evaluation, extra=stops, iterations=1)
    assert re.search(
        r"EarlyStopping: monitor=evaluation/sampled/sucess is not among .*evaluation/sampled/success", caplog.text
    )
    assert "monitor=evaluation/sampled/success is" not in caplog.text
