import random
import sys
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest

from freshper_lightning.envs.arena import TextArena
from freshper_lightning.envs.protocol import make_text_env
from tests.envs.replies import malformed_replies

GUESS = "GuessTheNumber-v0-raw"


def guesses(env, seed):
    """Play by bisection; everything that was said, and the last step."""
    told, low, high = [env.reset(seed=seed)[0]], 1, 20
    while True:
        guess = (low + high) // 2
        step = env.step(f"I guess [{guess}].")
        told.append(step[0])
        if step[2]:
            return told, step
        low, high = (guess + 1, high) if "higher" in step[0] else (low, guess - 1)


def test_a_game_is_won_through_the_adapter():
    told, last = guesses(make_text_env("freshper/TextArena-v0", {"game": GUESS}), seed=3)
    assert "between 1 and 20" in told[0]
    assert last[1:] == (1.0, True, False, {"valid": True, "success": True})


def test_the_own_move_is_not_said_again_and_an_invalid_one_is_told():
    env = TextArena(GUESS)
    env.reset(seed=0)
    told, reward, over, _, info = env.step("no number")
    assert "no number" not in told
    assert "invalid move" in told
    assert (reward, over, info) == (0.0, False, {"valid": False, "success": False})
    _, _, over, _, info = env.step("again no number")
    assert over
    assert info == {"valid": False, "success": False}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("[1]")


def test_ten_thousand_malformed_replies_neither_raise_nor_score():
    env = TextArena(GUESS)
    over, valid = True, 0
    for seed, reply in enumerate(malformed_replies(10_000, "seven")):
        if over:
            env.reset(seed=seed)
        _, reward, over, _, info = env.step(reply)
        assert reward <= 0
        assert not info["success"]
        valid += info["valid"]
    assert valid == 0


def test_equal_seeds_give_equal_games_also_side_by_side():
    alone = [guesses(TextArena(GUESS), seed)[0] for seed in range(8)]
    assert len({tuple(told) for told in alone}) > 1
    envs = [TextArena("Minesweeper-v0-raw") for _ in range(2)]
    boards = [[env.reset(seed=5)[0]] for env in envs]
    for move in ("[3 3]", "[0 7]"):
        for env, board in zip(envs, boards, strict=True):
            board.append(env.step(move)[0])
    assert boards[0] == boards[1]
    assert [guesses(TextArena(GUESS), seed)[0] for seed in range(8)] == alone


def test_a_game_leaves_pythons_global_generator_alone():
    state = random.getstate()
    guesses(TextArena(GUESS), seed=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(lambda seed: guesses(TextArena(GUESS), seed)[0], range(8)))
    sys.setswitchinterval(interval)
    assert told == [guesses(TextArena(GUESS), seed)[0] for seed in range(8)]
    assert random.getstate() == state


@pytest.mark.parametrize("name", ["NoSuchGame-v0", "TicTacToe-v0-raw"])
def test_an_unknown_game_and_one_for_two_are_refused(name):
    with pytest.raises(ValueError, match=f"game='{name}' .* is no game for one player"):
        TextArena(name)
