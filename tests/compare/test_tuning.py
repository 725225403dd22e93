"""The rate of an arm is the one with the best mean result, and belongs to the configuration that was tuned."""

import pytest
from omegaconf import OmegaConf

from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.settings import read_comparison
from freshper_lightning.compare.tuning import choice_of, is_chosen, trials, tuned, write_choices
from freshper_lightning.errors import ConfigurationError
from tests.compare.files import TINY_COMPARISON, edited


@pytest.fixture
def plan(tiny_environment, tmp_path):
    comparison = read_comparison(TINY_COMPARISON)
    return Plan(comparison, tmp_path, comparison.chosen(None))


def test_every_arm_has_the_same_trials_on_seeds_of_their_own(plan):
    found = trials(plan)
    assert list(found) == ["on_policy", "freshper_50"]
    for by_factor in found.values():
        rates = [[run.recipe.learning_rate() for run in runs] for runs in by_factor.values()]
        assert rates == [[0.01], [0.03]]
        assert {run.seed for runs in by_factor.values() for run in runs} == {100}
        assert {run.recipe.config["evaluation"]["instances"] for runs in by_factor.values() for run in runs} == {1}
        assert all("--evaluation.instances=1" in run.recipe.options for runs in by_factor.values() for run in runs)
    assert {recipe.config["evaluation"]["instances"] for recipe in plan.recipes.values()} == {0}


def test_the_best_result_wins_and_of_equal_ones_the_arm_s_own_rate(plan):
    assert choice_of(plan, "freshper_50", {1 / 3: 0.2, 1.0: 0.5, 3.0: 0.6}).learning_rate == pytest.approx(0.03)
    assert choice_of(plan, "freshper_50", {1 / 3: 0.5, 1.0: 0.5, 3.0: 0.5}).learning_rate == pytest.approx(0.01)
    assert choice_of(plan, "freshper_50", {1 / 3: 0.5, 1.0: 0.5, 3.0: 0.4}).results == {
        "0.333": 0.5,
        "1": 0.5,
        "3": 0.4,
    }


def test_a_best_rate_at_the_edge_of_the_search_is_said(plan):
    assert choice_of(plan, "freshper_50", {1 / 3: 0.2, 1.0: 0.5, 3.0: 0.6}).at_edge
    assert choice_of(plan, "freshper_50", {1.0: 0.6, 1 / 3: 0.7, 3.0: 0.2}).at_edge
    assert not choice_of(plan, "freshper_50", {1 / 3: 0.5, 1.0: 0.5, 3.0: 0.5}).at_edge
    assert not choice_of(plan, "freshper_50", {1.0: 0.5}).at_edge
    in_single_precision = choice_of(plan, "freshper_50", {1 / 3: 0.2000000030, 1.0: 0.2000000029, 3.0: 0.1})
    assert in_single_precision.learning_rate == pytest.approx(0.01)
    assert not in_single_precision.at_edge
    across_a_digit = choice_of(plan, "freshper_50", {1.0: 0.5015624999999999, 3.0: 0.5015625000000001})
    assert across_a_digit.learning_rate == pytest.approx(0.01)


def test_arms_take_the_rates_that_were_chosen_for_them(plan, tmp_path):
    path = tmp_path / "learning_rates.yaml"
    assert tuned(path, plan) == plan.recipes
    for arm, best in (("on_policy", 1.0), ("freshper_50", 3.0)):
        write_choices(path, {arm: choice_of(plan, arm, {1.0: 0.5, best: 0.6})})
    rates = {arm: recipe.learning_rate() for arm, recipe in tuned(path, plan).items()}
    assert rates == {"on_policy": 0.01, "freshper_50": 0.03}
    (option,) = set(tuned(path, plan)["freshper_50"].options) - set(plan.recipes["freshper_50"].options)
    assert option == "--model.optimizer.init_args.lr=0.03"


def test_rates_of_other_arms_and_of_other_configurations_are_refused(plan, tmp_path):
    path = tmp_path / "learning_rates.yaml"
    write_choices(path, {"on_policy": choice_of(plan, "on_policy", {1.0: 0.5})})
    with pytest.raises(ConfigurationError, match="has no learning rate of freshper_50: run --tune"):
        tuned(path, plan)
    assert is_chosen(path, plan, "on_policy")
    assert not is_chosen(path, plan, "freshper_50")
    for changes in (
        {"settings": {"data": {"init_args": {"alpha": 0.1}}}},
        {"tuning": {"factors": [1, 2]}},
        {"tuning": {"seeds": [101]}},
        {"tuning": {"instances": 2}},
        {"tuning": {"final_window": 2}},
        {"mode": "greedy"},
        {"model": "another"},
    ):
        changed = Plan(read_comparison(edited(tmp_path / "c.yaml", changes)), tmp_path, ["on_policy"])
        assert not is_chosen(path, changed, "on_policy")
        with pytest.raises(ConfigurationError, match=r"on_policy, where it starts or .* has changed"):
            tuned(path, changed)


@pytest.mark.parametrize("text", ["nothing", "[1, 2]", "on_policy: 0.1", "on_policy: {learning_rate: 0.1}", "a: {b: ["])
def test_a_damaged_file_of_rates_is_refused_in_words(plan, tmp_path, text):
    path = tmp_path / "learning_rates.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"learning_rates\.yaml (cannot be read|must have digest)"):
        tuned(path, plan)


def test_a_choice_replaces_the_one_before_as_a_whole(plan, tmp_path):
    path = tmp_path / "learning_rates.yaml"
    write_choices(path, {"on_policy": choice_of(plan, "on_policy", {1.0: 0.5, 3.0: 0.6})})
    write_choices(path, {"freshper_50": choice_of(plan, "freshper_50", {1.0: 0.1})})
    write_choices(path, {"on_policy": choice_of(plan, "on_policy", {1.0: 0.1, 5.0: 0.2})})
    found = OmegaConf.load(path)
    assert found.on_policy.results == {"1": 0.1, "5": 0.2}
    assert found.freshper_50.results == {"1": 0.1}
