import os
import random
import subprocess
import sys
from decimal import getcontext

import numpy as np
import pytest
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS, register_dataset

from freshper_lightning.envs.checker import CheckError, CheckLimits, shared_pool
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.envs.reasoning import SCORES, ReasoningGym
from tests.envs.replies import malformed_replies

EVALUATED = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
)
"""Tasks whose scorers hand the answer to eval, or to sympy, which does the same."""
SUMS = {"task": "chain_sum", "config": {"min_digits": 1, "max_digits": 2}}


@pytest.fixture(scope="module", autouse=True)
def processes():
    """Kept between tests, which would start their own."""
    return shared_pool(CheckLimits(), SCORES)


@pytest.fixture
def of_one_process(monkeypatch):
    """Tasks that ask something else in every process are there as well."""
    monkeypatch.setattr(ReasoningGym, "_asked_elsewhere", lambda *_: True)
    monkeypatch.setattr("freshper_lightning.envs.reasoning._SOUND", set())


def solution(env):
    """What the question's own text comes to."""
    return eval(env.reset(seed=0)[0].rpartition(": ")[2].rstrip(" ="))


def test_a_question_is_answered_through_the_adapter():
    env = make_text_env("freshper/ReasoningGym-v0", SUMS)
    result = solution(env)
    assert env.step(f"Let me see. <answer>{result}</answer>")[1:] == (
        1.0,
        True,
        False,
        {"valid": True, "success": True},
    )


def test_an_answer_that_contains_the_right_one_does_not_count():
    env = ReasoningGym(**SUMS)
    result = solution(env)
    assert env.step(f"<answer>It is {result}.</answer>")[1] == 0


def test_the_seed_alone_chooses_the_question_and_even_seeds_never_meet_odd_ones():
    env = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    seen = [{env.reset(seed=2 * seed + parity)[0] for seed in range(150)} for parity in (0, 1)]
    assert seen[0].isdisjoint(seen[1])
    assert env.reset(seed=7)[0] == ReasoningGym("chain_sum", env.config).reset(seed=7)[0]


def test_malformed_replies_neither_raise_nor_score():
    env = ReasoningGym(**SUMS, attempts=10_001)
    right = str(solution(env))
    for reply in malformed_replies(10_000, right):
        assert env.step(reply)[1:3] == (0.0, False), reply[:200]


@pytest.mark.usefixtures("of_one_process")
@pytest.mark.parametrize("task", EVALUATED)
def test_code_in_an_answer_does_not_run(task, tmp_path):
    env, mark = ReasoningGym(task, attempts=20), tmp_path / "mark"
    env.reset(seed=2)
    code = f"__import__('os').system('touch {mark}')"
    classes = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close']"
    hidden = f'__import__("os").system("touch {mark}")'
    for answer in (
        *(code, f"[{code}]", f"sin({hidden!r})", f"1 + {hidden!r}", f"[open('{mark}', 'w')]", f"{{{code}}}"),
        *(f"(lambda: {code})()", f"[{code} for _ in range(1)]", f"1 if {code} else 2", f"f'{{{hidden}}}'"),
        *(f"exec({hidden!r})", f"sympify({hidden!r})", f"Symbol.__base__.__subclasses__({code})"),
        f"{classes}[0].__init__.__globals__['system']('touch {mark}')",
    ):
        assert env.step(f"<answer>{answer}</answer>")[1] == 0
        assert not mark.exists(), answer


def test_code_does_not_run_in_a_task_made_of_others(tmp_path):
    env = ReasoningGym("composite", {"datasets": [DatasetSpec("countdown", 1, {}), DatasetSpec("n_queens", 1, {})]})
    for seed in range(6):
        env.reset(seed=seed)
        env.step(f"<answer>[__import__('os').system('touch {tmp_path / 'mark'}')]</answer>")
        assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("of_one_process")
@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("polynomial_multiplication", "{gold} + x - x"),
        ("simple_integration", "{gold} + sqrt(2) + exp(3)"),
        ("intermediate_integration", "{gold} + 0*sin(1)"),
        ("countdown", " ({gold}) "),
    ],
)
def test_an_answer_may_be_arithmetic_and_functions(task, answer):
    env = ReasoningGym(task)
    env.reset(seed=2)
    assert env.step(f"<answer>{answer.format(gold=env._entry['answer'])}</answer>")[1] == 1


def test_an_answer_that_takes_too_long_is_an_error_and_the_next_one_is_scored():
    env = ReasoningGym("countdown", attempts=2, check_seconds=1)
    env.reset(seed=2)
    with pytest.raises(CheckError, match=r"the check of '9\*\*9\*\*9\*\*9' against .* took more than 1 s"):
        env.step("<answer>9**9**9**9</answer>")
    assert env.step(f"<answer>{env._entry['answer']}</answer>")[1] == 1


BY_HASH = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Tasks whose questions are drawn from sets of strings."""


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="strings have the same hashes in every process")
@pytest.mark.parametrize("task", BY_HASH)
def test_a_task_that_asks_something_else_in_every_process_is_refused_with_what_helps(task, monkeypatch):
    monkeypatch.setattr("freshper_lightning.envs.reasoning._SOUND", set())
    with pytest.raises(ValueError, match=f"task='{task}' has other questions in every process, .* PYTHONHASHSEED"):
        ReasoningGym(task)
    run = f"from freshper_lightning.envs.reasoning import ReasoningGym; print(ReasoningGym('{task}').reset(seed=2)[0])"
    asked = {
        subprocess.run(
            [sys.executable, "-c", run], env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(asked) == 1


@pytest.mark.usefixtures("of_one_process")
@pytest.mark.parametrize("task", sorted(set(DATASETS) - {"composite", "game_of_life_halting", "coin_flip"}))
def test_every_task_takes_its_own_answer_and_no_junk_and_leaves_the_process_alone(task):
    before = getcontext().prec, random.getstate(), np.random.get_state()[1].tolist()
    env = ReasoningGym(task)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        assert env.reset(seed=seed)[0] == observation
        if (gold := env._entry["answer"]) is not None:
            assert env.score(str(gold)) == 1
    assert (getcontext().prec, random.getstate(), np.random.get_state()[1].tolist()) == before
    for junk in ("2 and 3", "[[]]", "{}", "null", '{"a": 1}', "1/0", "a=b", "(", "nan", "nanj", "[nan, nan]", "\ud800"):
        assert env.score(junk) == 0, junk


@pytest.mark.parametrize(
    ("task", "answer"), [("prime_factorization", "2 and 3"), ("boxnet", "5"), ("game_of_life", "{}")]
)
def test_an_answer_of_a_shape_that_the_scorer_does_not_expect_scores_0(task, answer):
    env = ReasoningGym(task)
    env.reset(seed=0)
    assert env.step(f"<answer>{answer}</answer>")[1:3] == (0.0, True)


def test_nan_is_right_where_it_is_the_word():
    pool = shared_pool(CheckLimits(), SCORES)
    assert pool.check("nan", "nan", "spell_backward", {}, {"answer": "nan"})
    assert not pool.check("0.25", "nan", "coin_flip", {}, {"answer": "0.25"})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("game_of_life_halting", r"takes '\?' for right where the answer is false or true"),
        ("coin_flip", r"takes '0' for right where the answer is 0\.125 or 0\.\d+"),
    ],
)
def test_a_task_whose_scorer_takes_one_answer_for_several_is_refused(task, message):
    with pytest.raises(ValueError, match=rf"task='{task}' cannot be learned: its scorer in reasoning-gym {message}"):
        ReasoningGym(task)


def test_a_task_whose_scorer_refuses_its_own_answers_is_refused(monkeypatch):
    monkeypatch.setattr("freshper_lightning.envs.checker.CheckerPool.check", lambda *args: args[-1] == {})
    with pytest.raises(ValueError, match=r"task='leg_counting' cannot be learned: .* refuses the task's own answers"):
        ReasoningGym("leg_counting", {"min_animals": 2})


def test_a_scorer_is_tried_once_per_task_and_config(monkeypatch):
    ReasoningGym(**SUMS)
    tried = []
    monkeypatch.setattr(ReasoningGym, "_require_sound", lambda env: tried.append(env.config))
    other = {"min_digits": 1, "max_digits": 3}
    for config in (SUMS["config"], other, dict(other)):
        ReasoningGym("chain_sum", config)
    assert tried == [other]


@pytest.fixture
def registered():
    """A data set of the run's own, of which no other process knows."""
    register_dataset("my_sum", type("MySum", (ChainSumDataset,), {"__module__": "my_tasks"}), ChainSumConfig)
    yield "my_sum"
    del DATASETS["my_sum"]


def test_a_data_set_that_the_checkers_cannot_know_is_refused_and_never_a_wrong_answer(registered):
    with pytest.raises(ValueError, match=f"task='{registered}' must be one of reasoning-gym's own, not of my_tasks"):
        ReasoningGym(registered)
    with pytest.raises(CheckError, match=f"TaskError: Dataset '{registered}' not registered"):
        ReasoningGym("composite", {"datasets": [DatasetSpec(registered, 1, {})]})


def test_without_the_packages_it_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("freshper_lightning.envs.checker.find_spec", lambda name: None if name == "psutil" else name)
    with pytest.raises(ValueError, match=r"needs the package psutil: pip install -e '\.\[reasoning-gym\]'"):
        ReasoningGym(**SUMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "no_such_task"}, "task='no_such_task' with config={}: Dataset 'no_such_task' not registered"),
        ({"task": "chain_sum", "config": {"colour": 1}}, "unexpected keyword argument 'colour'"),
        ({"task": "composite"}, "task='composite' with config={}: "),
        ({**SUMS, "attempts": 0}, "attempts must be at least 1, not 0"),
        ({**SUMS, "checkers": 0}, "checkers=0 must be a whole number of at least 1"),
    ],
)
def test_what_reasoning_gym_does_not_have_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**arguments)
