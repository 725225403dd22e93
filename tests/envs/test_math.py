import json
import re
import sys
from decimal import Decimal
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.envs.checker import CheckError
from freshper_lightning.envs.math import INSTRUCTIONS, MathQuestion, marked_answer
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.envs.questions import read_number
from tests.envs.replies import malformed_replies
from tests.questions import write_questions

INSTRUCTION = INSTRUCTIONS["marker", "number"]
GSM8K = Path(__file__).parents[3] / "shared" / "data"


def parse_reply(reply):
    """The number of a reply in the form of GSM8K."""
    answer = marked_answer(reply)
    return None if answer is None else read_number(answer)


@pytest.fixture
def path(tmp_path):
    return str(write_questions(tmp_path / "questions.jsonl", range(50)))


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def env_of(tmp_path, answer="#### 18", **kwargs):
    env = MathQuestion(path=jsonl(tmp_path / "one.jsonl", {"question": "How many?", "answer": answer}), **kwargs)
    env.reset(seed=0)
    return env


@given(st.text())
def test_any_reply_can_be_judged(reply):
    assert parse_reply(reply) is None or parse_reply(reply).is_finite()


def test_a_number_of_any_length_is_read():
    assert parse_reply("#### " + "9" * 10_000) == Decimal("9" * 10_000)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("#### 18", 18),
        ("She sells 9 eggs.\n9 * 2 = 18\n####18\n\n", 18),
        ("#### 3\n#### 18", 18),
        ("  #### $18.00  ", 18),
        ("#### 18\nThat is all.", None),
        ("The answer is #### 18", None),
        ("#### 18 dollars", None),
        ("#### 17 or 18", None),
        ("####\n18", None),
        ("##### 18", None),
        ("### 18", None),
        ("The answer is 18", None),
        ("\\boxed{18}", None),
        ("<answer>18</answer>", None),
        ("", None),
    ],
)
def test_only_a_last_line_in_the_format_asked_for_counts(reply, number):
    assert parse_reply(reply) == number


@pytest.mark.parametrize(
    ("reply", "reward", "valid", "success"),
    [("9 * 2\n#### 18.0", 1.0, True, True), ("#### 17", 0.1, True, False), ("It is 18.", 0.0, False, False)],
)
def test_the_reward_is_graded(tmp_path, reply, reward, valid, success):
    _, got, terminated, truncated, info = env_of(tmp_path).step(reply)
    assert (got, terminated, truncated) == (reward, True, False)
    assert info == {"valid": valid, "success": success}


def test_a_question_is_answered_once(tmp_path):
    env = env_of(tmp_path)
    env.step("#### 1")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("#### 18")


def test_the_example_in_the_instruction_is_a_reply_in_the_format_asked_for():
    assert parse_reply(INSTRUCTION) == 7


def test_it_is_a_registered_environment_that_speaks_text(path):
    check_env(make_text_env("freshper/MathQuestion-v0", {"path": path}).unwrapped, skip_render_check=True)


@given(st.integers(0, 2**63 - 1))
def test_the_seed_alone_chooses_the_question(tmp_path_factory, seed):
    path = tmp_path_factory.getbasetemp() / "fifty.jsonl"
    if not path.exists():
        write_questions(path, range(50))
    fresh, used = MathQuestion(path=str(path)), MathQuestion(path=str(path))
    used.reset(seed=seed ^ 1)
    observation, _ = fresh.reset(seed=seed)
    assert observation == used.reset(seed=seed)[0]
    assert observation in fresh.observation_space
    assert observation == f"{INSTRUCTION}\n\n{fresh.question.text}"


def test_even_seeds_reach_every_question_about_equally_often(tmp_path):
    rows = [{"question": f"Question {index}?", "answer": index} for index in range(10)]
    env = MathQuestion(path=jsonl(tmp_path / "ten.jsonl", *rows))
    drawn = [int(env.reset(seed=2 * seed)[0].split()[-1].rstrip("?")) for seed in range(2000)]
    counts = [drawn.count(index) for index in range(10)]
    assert sum((count - 200) ** 2 / 200 for count in counts) < 27.9  # 99.9 % of a chi-square with 9 degrees of freedom


def test_the_file_is_read_once_for_all_environments(path):
    first = MathQuestion(path=path)
    Path(path).unlink()
    assert MathQuestion(path=path).questions is first.questions


def test_questions_of_gsm8k_are_read(tmp_path):
    files = [*GSM8K.glob("gsm8k_*.jsonl"), write_questions(tmp_path / "made.jsonl", range(200))]
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        env = MathQuestion(path=str(file))
        assert [question.text for question in env.questions] == [row["question"].strip() for row in rows]
        for row, question in zip(rows, env.questions, strict=True):
            assert parse_reply(row["answer"]) == read_number(question.answer)


def test_an_answer_may_be_a_bare_number_and_fields_may_have_other_names(tmp_path):
    path = jsonl(
        tmp_path / "other.jsonl", {"problem": "1 + 1?", "solution": 2}, {"problem": "1 / 2?", "solution": "0.50"}
    )
    env = MathQuestion(path=path, question_field="problem", answer_field="solution")
    assert [question.answer for question in env.questions] == ["2", "0.50"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no questions"),
        (["", "  "], "holds no questions"),
        (['{"question": '], "line 1 is not JSON"),
        (["", "[1, 2]"], "line 2 must be a JSON object"),
        ([{"question": "?", "result": "1"}], "row 1 has no answer_field='answer'; its fields are question, result"),
        ([{"answer": "1"}], "row 1 has no question_field='question'; its fields are answer"),
        ([{"question": "?", "answer": 1}, {"question": "?", "answer": "blue"}], "row 2: answer must be a number"),
        ([{"question": "?", "answer": True}], "row 1: answer must be a number"),
        *[
            ([{"question": "?", "answer": 1}, {"question": "!", "answer": value}], "row 2: answer must be a number")
            for value in (None, [18], {"value": 18}, True, float("nan"), float("inf"))
        ],
        ([{"question": " ", "answer": 1}], "row 1: question must be a text"),
        (
            [{"question": "?", "answer": 1}, {"question": "?", "answer": "1.0"}, {"question": " ? ", "answer": 2}],
            "row 3 has answer='2', which must be '1' as in an earlier row with the same question",
        ),
        (
            [{"question": "Tom’s –  half?", "answer": 1}, {"question": "tom's - half?", "answer": 2}],
            "row 2 has answer='2', which must be '1' as in an earlier row with the same question",
        ),
    ],
)
def test_a_file_that_cannot_serve_is_refused(tmp_path, rows, message):
    path = jsonl(tmp_path / "broken.jsonl", *rows)
    with pytest.raises(ValueError, match=r"path=.*broken\.jsonl") as refusal:
        MathQuestion(path=path)
    assert message in str(refusal.value)


@pytest.mark.parametrize("value", [None, [18], {"value": 18}, False, float("nan"), ""])
def test_what_is_no_answer_is_not_taken_as_text(tmp_path, value):
    with pytest.raises(ValueError, match=r"row 1: answer must be a text or a number, not"):
        env_of(tmp_path, value, answers="expression")


@pytest.mark.parametrize(("value", "written"), [(1e16, "1" + "0" * 16), (1e-7, "0.0000001"), (-2.5, "-2.5"), (3, "3")])
def test_a_number_is_taken_in_decimal_notation(tmp_path, value, written):
    assert env_of(tmp_path, value).questions[0].answer == written


def test_expressions_that_math_verify_cannot_read_are_counted_once_and_compared_as_text(tmp_path, caplog):
    answers = "1/2", r"A \cup B", "blue", "1/0"
    rows = [{"question": f"{answer}?", "answer": answer} for answer in answers]
    settings = {"path": jsonl(tmp_path / "some.jsonl", *rows), "answers": "expression", "check_seconds": 60}
    env = MathQuestion(**settings)
    MathQuestion(**settings)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "2 of 4 answers cannot be read by math-verify and are compared as text: row 2 has" in record.getMessage()
    for seed in range(12):
        env.reset(seed=seed)
        assert env.score(env.question.answer) == 1
        assert env.score("0") == env.format_reward


def test_a_checker_that_does_not_work_is_no_fault_of_the_data_and_ends_at_the_first_row(tmp_path, monkeypatch):
    asked = []

    def check(self, gold, answer):
        asked.append(gold)
        raise CheckError("the start of a checker was lost")

    monkeypatch.setattr("freshper_lightning.envs.checker.CheckerPool.check", check)
    rows = [{"question": f"{index}?", "answer": f"1/{index}"} for index in range(1, 5)]
    with pytest.raises(CheckError, match="the start of a checker was lost"):
        MathQuestion(path=jsonl(tmp_path / "good.jsonl", *rows), answers="expression")
    assert asked == ["1/1"]


def test_an_expression_that_takes_too_long_to_read_is_refused_at_the_start(tmp_path):
    endless = "+".join(f"x^{{{power}}}" for power in range(5000))
    with pytest.raises(CheckError, match=r"reading 'x\^\{0\}\+.*' took more than 0\.01 s"):
        env_of(tmp_path, endless, answers="expression", check_seconds=0.01)


def test_one_question_has_one_answer_however_it_is_written(tmp_path):
    rows = [{"question": "?", "answer": answer} for answer in ("1/2", r"\frac{1}{2}", "0.5", "1/3")]
    settings = {"answers": "expression", "check_seconds": 60}
    assert len(MathQuestion(path=jsonl(tmp_path / "alike.jsonl", *rows[:3]), **settings).questions) == 3
    with pytest.raises(ValueError, match="row 4 has answer='1/3', which must be '1/2' as in an earlier row"):
        MathQuestion(path=jsonl(tmp_path / "unlike.jsonl", *rows), **settings)


@pytest.mark.parametrize(("name", "value"), [("split", "train[:60]"), ("config", "main")])
def test_what_has_no_effect_on_a_file_is_refused(path, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be left out with path='.*', not '{re.escape(value)}'"):
        MathQuestion(path=path, **{name: value})


@pytest.mark.parametrize("arguments", [{"path": 5}, {"dataset": ["a"]}, {"dataset": "a", "split": 60}, {"path": ""}])
def test_a_source_is_named_by_texts(arguments):
    with pytest.raises(ValueError, match=r"(path|dataset|split) must be a text, not"):
        MathQuestion(**arguments)


def test_a_missing_file_and_a_missing_source_are_refused_by_key(tmp_path):
    with pytest.raises(ValueError, match=r"path='nowhere\.jsonl' is not a file"):
        MathQuestion(path="nowhere.jsonl")
    for arguments in ({}, {"path": "a", "dataset": "b"}):
        with pytest.raises(ValueError, match="exactly one of path and dataset"):
            MathQuestion(**arguments)


def test_a_data_set_without_the_package_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="dataset='openai/gsm8k' needs the package datasets"):
        MathQuestion(dataset="openai/gsm8k", config="main")


def test_a_data_set_is_read_by_name_configuration_split_and_field(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "problems"
    (folder / "data").mkdir(parents=True)
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(5)]
    jsonl(folder / "data" / "main.jsonl", *rows)
    jsonl(folder / "data" / "other.jsonl", {"problem": "?", "answer": "7"})
    files = "\n".join(f"- config_name: {name}\n  data_files: data/{name}.jsonl" for name in ("main", "other"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{files}\n---\n")
    source = {"dataset": str(folder), "config": "main", "question_field": "problem"}
    first, rest = (MathQuestion(**source, split=split) for split in ("train[:2]", "train[2:]"))
    assert [question.answer for question in first.questions] == ["0", "2"]
    assert [question.answer for question in rest.questions] == ["4", "6", "8"]
    assert not first.instances & rest.instances
    assert [question.answer for question in MathQuestion(**{**source, "config": "other"}).questions] == ["7"]
    with pytest.raises(ValueError, match=r"dataset='.*problems', config='none', split='train' cannot be loaded"):
        MathQuestion(**{**source, "config": "none"})


def test_the_last_of_several_attempts_is_scored_and_failing_first_does_not_pay(tmp_path):
    env = env_of(tmp_path, attempts=3, form="tag", format_reward=0.1)
    first = env.step("<answer>17</answer>")
    assert first == (
        "Reward: 0\nThat is not right. Attempts left: 2",
        0.0,
        False,
        False,
        {"valid": True, "success": False},
    )
    second = env.step("17?")
    assert second[0] == "Reward: 0\nThere was no answer in the form asked for. Attempts left: 1"
    assert second[1:3] == (0.0, False)
    assert env.step("<answer>18</answer>")[1:] == (1.0, True, False, {"valid": True, "success": True})
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("<answer>18</answer>")


def test_the_attempts_run_out_with_the_reward_of_the_last(tmp_path):
    env = env_of(tmp_path, attempts=2, form="tag")
    assert env.step("<answer>17</answer>")[1:3] == (0.0, False)
    assert env.step("<answer>17</answer>")[1:] == (0.1, True, False, {"valid": True, "success": False})


def test_feedback_never_tells_the_answer(tmp_path):
    env = env_of(tmp_path, attempts=5)
    assert not any("18" in env.step(reply)[0] for reply in ("#### 17", "", "#### x", "#### 1"))


@pytest.mark.parametrize("form", ["marker", "tag"])
def test_ten_thousand_malformed_replies_neither_raise_nor_score(tmp_path, form):
    env = env_of(tmp_path, attempts=10_001, form=form)
    for reply in malformed_replies(10_000, right="18"):
        _, reward, over, _, info = env.step(reply)
        assert (reward, over, info["success"]) == (0.0, False, False), reply[:200]


@pytest.mark.parametrize(
    ("answer", "reply", "success"),
    [
        ("#### 0.75", "<answer>\\frac{3}{4}</answer>", True),
        ("x \\boxed{\\left[0,1\\right)}", "so <answer>[0, 1)</answer>", True),
        ("1000", "<answer>1,000</answer>", True),
        ("1000", "<answer>1</answer>", False),
        ("1000", "<answer>" + "page " * 60 + "1000</answer>", False),
    ],
)
def test_expressions_are_checked_by_math_verify(tmp_path, answer, reply, success):
    env = env_of(tmp_path, answer, answers="expression", form="tag", check_seconds=60)
    assert env.step(reply)[4]["success"] is success
    env.close()


def test_malformed_expressions_neither_raise_nor_score(tmp_path):
    env = env_of(tmp_path, r"\frac{37}{4}", attempts=10_001, answers="expression", form="tag", check_seconds=60)
    for reply in malformed_replies(10_000, right="37"):
        assert env.step(f"<answer>{reply[:200]}</answer>")[1] == 0, reply[:200]
    env.close()


def test_a_check_without_a_verdict_raises_and_is_not_a_reward_of_zero(tmp_path):
    env = env_of(tmp_path, answers="expression", form="tag", check_seconds=1)
    with pytest.raises(CheckError, match="took more than 1 s"):
        env.step("<answer>(10^9)!</answer>")
    env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attempts": 0}, "attempts must be at least 1, not 0"),
        ({"form": "box"}, "form must be one of marker, tag, not 'box'"),
        ({"answers": "words"}, "answers must be one of number, expression, not 'words'"),
        ({"format_reward": "0.1"}, "format_reward must be in \\[0, 1\\), not '0.1'"),
        ({"format_reward": 1.0}, "format_reward must be in \\[0, 1\\), not 1.0"),
        ({"answers": "expression", "check_seconds": 0}, "check_seconds=0 must be a number above 0"),
        ({"check_seconds": float("inf")}, "check_seconds=inf must be a number above 0"),
        ({"checkers": -3}, "checkers=-3 must be a whole number of at least 1"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(path, arguments, message):
    with pytest.raises(ValueError, match=message):
        MathQuestion(path=path, **arguments)


def test_expressions_without_math_verify_are_refused_with_what_to_install(path, monkeypatch):
    monkeypatch.setattr("freshper_lightning.envs.checker.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package math_verify: pip install -e '\.\[math\]'"):
        MathQuestion(path=path, answers="expression")
