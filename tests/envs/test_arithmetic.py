import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.envs.arithmetic import (
    INSTRUCTION,
    ISOLATE,
    Arithmetic,
    Calculation,
    corpus,
    demonstrate,
    draw_calculation,
)
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.policy.tiny import train_tokenizer
from tests.envs.replies import malformed_replies

SEEDS = st.integers(0, 2**62)


def test_a_calculation_is_written_and_worked_out_from_left_to_right():
    calculation = Calculation((7, -12, 5))
    assert str(calculation) == "7 - 12 + 5"
    assert calculation.totals() == [-5, 0]


@given(SEEDS, st.integers(2, 5), st.integers(2, 30))
def test_numbers_are_within_bounds_and_the_result_is_that_of_the_text(seed, terms, largest):
    calculation = draw_calculation(terms, largest, np.random.default_rng(seed))
    assert len(calculation.numbers) == terms
    assert calculation.numbers[0] > 0
    assert all(1 <= abs(number) <= largest for number in calculation.numbers)
    assert eval(str(calculation)) == calculation.totals()[-1]


@given(SEEDS)
def test_the_seed_alone_chooses_the_calculation(seed):
    fresh, used = Arithmetic(), Arithmetic()
    used.reset(seed=seed ^ 1)
    observation = fresh.reset(seed=seed)[0]
    assert observation == used.reset(seed=seed)[0] == f"{INSTRUCTION}\n\n{fresh.calculation}"
    assert observation in fresh.observation_space


def test_even_and_odd_seeds_never_meet_and_both_cover_their_half():
    env = Arithmetic(terms=2, largest=5)
    seen = [{env.reset(seed=2 * seed + parity)[0] for seed in range(1000)} for parity in (0, 1)]
    assert seen[0].isdisjoint(seen[1])
    assert len(seen[0] | seen[1]) == 5 * 5 * 2


@pytest.mark.parametrize(
    ("reply", "reward", "valid"),
    [
        ("<answer>{}</answer>", 1.0, True),
        ("nonsense steps\n<answer> {} </answer> done", 1.0, True),
        ("<answer>1{}1</answer>", 0.0, True),
        ("<answer>{}.0</answer>", 0.0, False),
        ("<answer>{}</answer><answer>{}</answer>", 0.0, False),
        ("{}", 0.0, False),
    ],
)
def test_only_the_result_in_the_one_tag_scores(reply, reward, valid):
    env = Arithmetic()
    env.reset(seed=0)
    result = env.calculation.totals()[-1]
    _, got, terminated, truncated, info = env.step(reply.format(result, result))
    assert (got, terminated, truncated) == (reward, True, False)
    assert info == {"valid": valid, "success": reward == 1}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("")


def test_ten_thousand_malformed_replies_neither_raise_nor_score():
    env = Arithmetic(attempts=10_001)
    env.reset(seed=0)
    for reply in malformed_replies(10_000, right=str(env.calculation.totals()[-1])):
        assert env.step(reply)[1:3] == (0.0, False), reply[:200]


def test_demonstrations_slip_as_often_as_asked_and_no_noise_is_no_slip():
    def share(noise):
        env = Arithmetic()
        rewards = []
        for seed in range(400):
            ((observation, reply),) = demonstrate(seed, noise)
            assert observation == env.reset(seed=seed)[0]
            rewards.append(env.step(reply)[1])
        return np.mean(rewards)

    assert share(0.0) == 1
    assert share(0.5) == pytest.approx(0.25 + 2 * 0.25 * 0 + 0.25 / 4, abs=0.08)  # no slip, or two that cancel
    assert demonstrate(3, 0.5) == demonstrate(3, 0.5)


def test_digits_are_tokens_of_their_own_in_a_small_vocabulary():
    tokenizer = train_tokenizer(corpus(50, seed=0), 400, ISOLATE)
    ids = tokenizer("12 + 34 = 46\n", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids] == ["1", "2", " + ", "3", "4", " = ", "4", "6", "\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"terms": 1}, "terms must be at least 2"),
        ({"largest": 1}, "largest must be in"),
        ({"attempts": 0}, "attempts"),
        ({"terms": 2, "largest": 3}, "terms=2, largest=3 must be larger: .* none is for evaluation"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**arguments)
    with pytest.raises(ValueError, match="noise must be in"):
        demonstrate(0, 1.5)


def test_it_is_a_registered_environment_that_speaks_text():
    check_env(make_text_env("freshper/Arithmetic-v0", {}).unwrapped, skip_render_check=True)
