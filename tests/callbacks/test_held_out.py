import json

import pytest

from datamodules.demonstrations import DemonstrationsDataModule
from freshper_lightning.algorithms.algorithm import SFT
from freshper_lightning.callbacks.checks import check_held_out
from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.retrieval import build_index
from freshper_lightning.rollout.collector import EnvironmentConfig
from tests.envs.moon import PAGES, jsonl
from tests.loop import policy, rollout_callback, trainer


def questions(path, *texts):
    path.write_text("".join(json.dumps({"question": text, "answer": 1}) + "\n" for text in texts))
    return EnvironmentConfig("freshper/MathQuestion-v0", {"path": str(path)})


def test_problems_that_are_trained_on_are_not_evaluated_on(tmp_path):
    train = questions(tmp_path / "train.jsonl", "What is 1?", "What is 2 - 1?")
    check_held_out(train, questions(tmp_path / "test.jsonl", "What is 3 - 2?"), {})
    overlapping = questions(tmp_path / "overlap.jsonl", "what is  2 - 1?", "What is 3 - 2?")
    with pytest.raises(ConfigurationError, match=r"evaluation\.environment=.*shares 1 instances .* 'what is 2 - 1\?'"):
        check_held_out(train, overlapping, {})
    with pytest.raises(ConfigurationError, match="shares 2 instances"):
        check_held_out(train, train, {})


def test_one_source_for_both_is_refused_and_generated_instances_are_not(tmp_path):
    with pytest.raises(ConfigurationError, match=r"evaluation\.environment=null would evaluate on the 1 instances"):
        check_held_out(questions(tmp_path / "train.jsonl", "What is 1?"), None, {})
    check_held_out(EnvironmentConfig("freshper/Arithmetic-v0"), None, {})


def searches(path, index, *texts):
    rows = [{"question": text, "answer": "1972"} for text in texts]
    return EnvironmentConfig("freshper/SearchQuestion-v0", {"questions": jsonl(path, rows), "index": index})


@pytest.fixture
def index(tmp_path):
    build_index(jsonl(tmp_path / "corpus.jsonl", [{"contents": page} for page in PAGES]), tmp_path / "index")
    return str(tmp_path / "index")


def test_questions_that_are_searched_for_in_training_are_not_evaluated_on(tmp_path, index):
    train = searches(tmp_path / "train.jsonl", index, "When?", "who was last on the Moon?")
    check_held_out(train, searches(tmp_path / "test.jsonl", index, "Where?"), {})
    overlapping = searches(tmp_path / "overlap.jsonl", index, "Who was last  on the moon?", "Where?")
    with pytest.raises(ConfigurationError, match=r"shares 1 instances .* 'who was last on the moon\?'"):
        check_held_out(train, overlapping, {})
    with pytest.raises(ConfigurationError, match=r"evaluation\.environment=null would evaluate on the 2 instances"):
        check_held_out(train, None, {})


def test_questions_that_are_demonstrated_are_not_evaluated_on(tmp_path, index):
    train, test = (searches(tmp_path / f"{name}.jsonl", index, name) for name in ("train", "test"))
    check_held_out(train, test, {"noise": 0.4, **train.kwargs})
    check_held_out(train, test, {"noise": 0.4})
    with pytest.raises(
        ConfigurationError, match=r"shares 1 instances with data\.arguments={'questions': .*'test'; what"
    ):
        check_held_out(train, test, {"noise": 0.4, "questions": test.kwargs["questions"]})


def test_a_level_is_held_out_from_demonstrations_that_name_a_file_where_training_names_none(tmp_path):
    for name, rows in (("held", "#####\n#@$.#\n#####"), ("other", "######\n#@ $.#\n######")):
        (tmp_path / f"{name}.xsb").write_text(rows)
    train = EnvironmentConfig("freshper/Sokoban-v0", {"rows": 6})
    held, other = ({"levels": str(tmp_path / f"{name}.xsb")} for name in ("held", "other"))
    check_held_out(train, EnvironmentConfig(train.id, held), {"noise": 0.1, **other})
    check_held_out(EnvironmentConfig(train.id, {"max_turns": 50, "max_moves": 40}), train, {"max_turns": 20})
    with pytest.raises(ConfigurationError, match=r"shares 1 instances with data\.arguments="):
        check_held_out(train, EnvironmentConfig(train.id, held), {"noise": 0.1, **held})


def test_demonstrations_of_what_is_evaluated_on_are_refused_before_the_model_is_loaded(model_path, tmp_path, index):
    train, test = (searches(tmp_path / f"{name}.jsonl", index, name) for name in ("train", "test"))
    module = policy(model_path, algorithm=SFT())
    data = DemonstrationsDataModule(show, {"questions": test.kwargs["questions"]}, episodes=2, batch_size=2, seed=0)
    run = trainer(
        tmp_path,
        rollout=rollout_callback(environment=train),
        evaluation=EvaluationCallback(episodes=2, environment=test),
    )
    with pytest.raises(ConfigurationError, match=r"shares 1 instances with data\.arguments="):
        run.fit(module, datamodule=data)
    assert module.net is None


def show(seed, questions):
    return [("test", "<answer>1972</answer>")]
