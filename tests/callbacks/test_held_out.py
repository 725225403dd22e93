import json

import pytest

from freshper_lightning.callbacks.checks import check_held_out
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.rollout.collector import EnvironmentConfig


def questions(path, *texts):
    path.write_text("".join(json.dumps({"question": text, "answer": 1}) + "\n" for text in texts))
    return EnvironmentConfig("freshper/MathQuestion-v0", {"path": str(path)})


def test_problems_that_are_trained_on_are_not_evaluated_on(tmp_path):
    train = questions(tmp_path / "train.jsonl", "What is 1?", "What is 2 - 1?")
    check_held_out(train, questions(tmp_path / "test.jsonl", "What is 3 - 2?"))
    overlapping = questions(tmp_path / "overlap.jsonl", "what is  2 - 1?", "What is 3 - 2?")
    with pytest.raises(ConfigurationError, match=r"evaluation\.environment=.*shares 1 instances .* 'what is 2 - 1\?'"):
        check_held_out(train, overlapping)
    with pytest.raises(ConfigurationError, match="shares 2 instances"):
        check_held_out(train, train)


def test_one_source_for_both_is_refused_and_generated_instances_are_not(tmp_path):
    with pytest.raises(ConfigurationError, match=r"evaluation\.environment=null would evaluate on the 1 instances"):
        check_held_out(questions(tmp_path / "train.jsonl", "What is 1?"), None)
    check_held_out(EnvironmentConfig("freshper/Arithmetic-v0"), None)
