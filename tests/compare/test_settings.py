"""A wrong comparison ends with the file, the key and what is allowed, before anything runs."""

import pytest

from freshper_lightning.cli import main
from freshper_lightning.compare.plan import Plan, check_seeds
from freshper_lightning.compare.settings import read_comparison
from freshper_lightning.errors import ConfigurationError
from tests.compare.files import TINY_COMPARISON, edited

WRONG = {
    "an unknown key": ({"armz": {}}, "armz"),
    "an unknown key of an arm": ({"arms": {"freshper_50": {"stak": []}}}, "arms.freshper_50.stak"),
    "an unknown baseline": ({"baseline": "none"}, "baseline=none must be one of the arms: on_policy, freshper_50"),
    "an unknown reference": ({"references": ["none"]}, "references=none must be some of freshper_50"),
    "the baseline as a reference": ({"references": ["on_policy"]}, "references=on_policy must be some of freshper_50"),
    "no evaluations of the search": ({"tuning": {"final_window": 0}}, "tuning.final_window=0 must be at least 1"),
    "a file that is not there": ({"arms": {"more": {"stack": ["no.yaml"]}}}, "arms.more.stack: no.yaml is not a file"),
    "a value of another type": ({"final_window": "many"}, "final_window"),
    "a value out of range": ({"final_window": 0}, "final_window=0 must be at least 1"),
    "an unknown metric": ({"metric": "luck"}, "metric=luck must be success or return"),
    "an unknown mode": ({"mode": "beam"}, "mode=beam must be sampled or greedy"),
    "no threads": ({"limits": {"threads": 0}}, "limits.threads=0 must be at least 1"),
    "no processor time": ({"limits": {"core_minutes": 0}}, "limits.core_minutes=0.0 must be above 0, or null"),
    "a search without the arm's own rate": ({"tuning": {"factors": [2]}}, "tuning.factors=.* with 1 among them"),
    "two starts": ({"warm_start": {"stack": []}}, "exactly one of warm_start and model"),
    "no start": ({"model": None}, "exactly one of warm_start and model"),
    "a name that is no folder": ({"arms": {"a/b": {}}}, "arms=a/b must be a letter or digit, and then letters"),
    "a name that no legend shows": ({"arms": {"_a": {}}}, "arms=_a must be a letter or digit"),
    "factors that name one run": (
        {"tuning": {"factors": [1, 1.001]}},
        "tuning.factors=.* different .* in three digits",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_key_or_value_is_named(tmp_path, tiny_environment, what):
    changes, message = WRONG[what]
    path = edited(tmp_path / "compare.yaml", changes)
    with pytest.raises(ConfigurationError, match=message) as refused:
        read_comparison(path)
    assert str(path) in str(refused.value)


def test_an_arm_that_is_there_twice_is_refused(tmp_path, tiny_environment):
    path = tmp_path / "compare.yaml"
    path.write_text(TINY_COMPARISON.read_text() + "  freshper_50: {}\n")
    with pytest.raises(ConfigurationError, match="duplicate key freshper_50"):
        read_comparison(path)


def test_a_file_or_a_key_that_is_missing_is_named(tmp_path, tiny_environment):
    with pytest.raises(ConfigurationError, match=r"no\.yaml is not a file"):
        read_comparison("no.yaml")
    (tmp_path / "short.yaml").write_text("task: hash\n")
    with pytest.raises(ConfigurationError, match=r"short\.yaml: stack must be given"):
        read_comparison(tmp_path / "short.yaml")


@pytest.mark.parametrize(("content", "said"), [(b"- task", "must be keys and their values"), (b"task: \xff", "utf-8")])
def test_a_file_that_holds_no_keys_is_refused(tmp_path, content, said):
    (tmp_path / "compare.yaml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"compare\.yaml: .*{said}"):
        read_comparison(tmp_path / "compare.yaml")


def test_a_model_that_is_not_there_is_refused_before_anything_runs(tiny_environment, tmp_path):
    file = edited(tmp_path / "compare.yaml", {"model": str(tmp_path / "none")})
    with pytest.raises(SystemExit, match=r"error: model='.*none' is not the folder of a Hugging Face model"):
        main(["compare", "-c", str(file), "--folder", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()


def test_unknown_arms_and_seeds_of_the_search_are_refused(tiny_environment):
    comparison = read_comparison(TINY_COMPARISON)
    with pytest.raises(ConfigurationError, match="--arms=x must be one of on_policy, freshper_50"):
        comparison.chosen(["x"])
    assert comparison.chosen(["freshper_50"]) == ["on_policy", "freshper_50"]
    with pytest.raises(ConfigurationError, match="--seeds=0 must be at least 1"):
        check_seeds(0, comparison)
    with pytest.raises(ConfigurationError, match=r"must not be seeds of the table: \[100\]"):
        check_seeds(101, comparison)


UNFIT = {
    "an unknown key": ({"arms": {"freshper_50": {"settings": {"data": {"init_args": {"taus": 1}}}}}}, "taus"),
    "a refused value": ({"settings": {"trainer": {"max_epochs": "x"}}}, "arms.on_policy: .*max_epochs"),
    "no length": ({"settings": {"trainer": {"max_epochs": -1}}}, "trainer.max_epochs=-1 must be the number of iter"),
    "a number of steps": (
        {"settings": {"trainer": {"max_steps": 5}}},
        "trainer.max_steps=5 must be left out",
    ),
    "a time": ({"settings": {"trainer": {"max_time": "00:01:00:00"}}}, "trainer.max_time=00:01:00:00 must be left o"),
    "no schedule": ({"settings": {"evaluation": {"every_n_iterations": None}}}, "every_n_iterations must be given"),
    "a mode that is not played": ({"settings": {"evaluation": {"modes": ["greedy"]}}}, "mode=sampled must be one of"),
    "too few evaluations": ({"final_window": 3}, "final_window=3 must be at most the evaluations of a run: 2"),
    "another length": (
        {"arms": {"freshper_50": {"settings": {"trainer": {"max_epochs": 9}}}}},
        "arms.freshper_50.settings: trainer.max_epochs=9 must be 2 as in on_policy: length, rollouts and evaluations",
    ),
    "other rollouts": (
        {"arms": {"freshper_50": {"settings": {"rollout": {"group_size": 3}}}}},
        "arms.freshper_50.settings: rollout.group_size=3 must be ",
    ),
    "other held-out instances": (
        {"arms": {"freshper_50": {"settings": {"evaluation": {"instances": 2}}}}},
        "arms.freshper_50.settings: evaluation.instances=2 must be 0 as in on_policy",
    ),
    "a search on the table's instances": (
        {"settings": {"evaluation": {"instances": 1}}},
        "tuning.instances=1 must not be settings.evaluation.instances",
    ),
    "too few evaluations of the search": (
        {"tuning": {"final_window": 3}},
        "tuning.final_window=3 must be at most the evaluations of a run: 2",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_arm_that_cannot_run_is_refused_before_any_does(tmp_path, tiny_environment, what):
    changes, message = UNFIT[what]
    comparison = read_comparison(edited(tmp_path / "compare.yaml", changes))
    with pytest.raises(ConfigurationError, match=message):
        _ = Plan(comparison, tmp_path / "folder", comparison.chosen(None)).recipes
    assert not (tmp_path / "folder" / "runs").exists()


def test_the_command_ends_with_one_line(tmp_path, tiny_environment):
    with pytest.raises(SystemExit, match=r"freshper: error: .*baseline=none must be one of the arms"):
        main(["compare", "-c", str(edited(tmp_path / "compare.yaml", {"baseline": "none"}))])
    with pytest.raises(SystemExit, match="freshper: error: --jobs=0 must be at least 1"):
        main(["compare", "-c", str(TINY_COMPARISON), "--jobs=0"])


def test_settings_of_an_arm_are_above_those_of_all_and_those_above_the_stacks(tmp_path, tiny_environment):
    changes = {
        "settings": {"data": {"init_args": {"batch_size": 8, "alpha": 0.5}}},
        "arms": {"freshper_50": {"settings": {"data": {"init_args": {"alpha": 0.7}}}}},
    }
    comparison = read_comparison(edited(tmp_path / "compare.yaml", changes))
    recipe = Plan(comparison, tmp_path, comparison.chosen(None)).recipes["freshper_50"]
    settings = recipe.config["data"]["init_args"]
    assert (settings["alpha"], settings["batch_size"], settings["beta_updates"]) == (0.7, 8, 20)
    assert recipe.at(0.5).learning_rate() == 0.5
    assert recipe.learning_rate() == 0.01
