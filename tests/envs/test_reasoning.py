import pytest

from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.envs.reasoning import ReasoningGym
from tests.envs.replies import malformed_replies

SUMS = {"task": "chain_sum", "config": {"min_digits": 1, "max_digits": 2}}


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


@pytest.mark.parametrize(
    "arguments", [{"task": "no_such_task"}, {"task": "chain_sum", "config": {"colour": 1}}, {**SUMS, "attempts": 0}]
)
def test_what_reasoning_gym_does_not_have_is_refused(arguments):
    with pytest.raises(ValueError, match=r"no_such_task|colour|attempts"):
        ReasoningGym(**arguments)
