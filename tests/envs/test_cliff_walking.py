import re
from collections import deque

import numpy as np
import pytest

from freshper_lightning.envs.cliff_walking import (
    CLIFF_REWARD,
    GOAL,
    OPTIMAL_RETURN,
    START,
    CliffWalking,
    demonstrate,
    is_cliff,
    moved,
)
from freshper_lightning.envs.grid import ACTIONS
from tests.envs.grids import answer, board


def fresh(**kwargs):
    env = CliffWalking(**kwargs)
    env.reset(seed=0)
    return env


def play(env, *actions):
    return [env.step(answer(action)) for action in actions]


def test_the_map_has_start_and_goal_at_the_ends_of_the_cliff():
    rows = board(CliffWalking().reset(seed=0)[0])
    assert rows == [["_"] * 12] * 3 + [["P", *"C" * 10, "G"]]


def test_the_optimum_is_thirteen_moves_of_cost_one():
    distances, frontier = {START: 0}, deque([START])
    while frontier:
        cell = frontier.popleft()
        for ahead in (moved(cell, action) for action in ACTIONS):
            if ahead not in distances and not is_cliff(ahead):
                distances[ahead] = distances[cell] + 1
                frontier.append(ahead)
    assert -distances[GOAL] == OPTIMAL_RETURN == -13
    steps = play(fresh(), "Up", *["Right"] * 11, "Down")
    assert sum(step[1] for step in steps) == OPTIMAL_RETURN
    assert steps[-1][2:] == (True, False, {"valid": True, "effective": True, "success": True})
    assert steps[-1][0].splitlines()[4].endswith("C √")


def test_the_demonstrator_without_noise_plays_the_optimum():
    env = fresh()
    assert sum(env.step(reply)[1] for _, reply in demonstrate(0, 0.0)) == OPTIMAL_RETURN
    assert env.won


@pytest.mark.parametrize("column", range(1, 11))
def test_a_step_onto_the_cliff_costs_a_hundred_and_leads_back_to_the_start(column):
    env = fresh()
    play(env, "Up", *["Right"] * column)
    _, reward, terminated, truncated, info = env.step(answer("Down"))
    assert reward == CLIFF_REWARD == -100
    assert (terminated, truncated, info["success"], info["effective"]) == (False, False, False, True)
    assert env.player == START


def test_a_step_off_the_map_costs_one_and_stays():
    env = fresh()
    for _, reward, _, _, info in play(env, "Left", "Down"):
        assert reward == -1
        assert info == {"valid": True, "effective": False, "success": False}
    assert env.player == START


def test_an_invalid_reply_costs_one_and_stays():
    env = fresh()
    _, reward, terminated, truncated, info = env.step("up")
    assert (reward, terminated, truncated) == (-1.0, False, False)
    assert info == {"valid": False, "effective": False, "success": False}


def test_forty_turns_without_the_goal_truncate_at_minus_forty():
    env = fresh()
    steps = play(env, *["Left"] * 40)
    assert sum(step[1] for step in steps) == -40
    assert [step[3] for step in steps] == [False] * 39 + [True]
    assert not env.won


def test_there_is_one_instance_whatever_the_seed():
    assert len({CliffWalking().reset(seed=seed)[0] for seed in range(20)}) == 1


def test_the_instruction_describes_what_is_shown():
    env = fresh()
    described = dict(re.findall(r"(\S) is (?:the )?(you|ground|cliff|goal)", env.instruction()))
    assert described == {"P": "you", "_": "ground", "C": "cliff", "G": "goal"}
    assert {cell for row in board(env.reset(seed=0)[0]) for cell in row} == set(described)
    assert "up to 40 turns" in env.instruction()


def test_demonstrations_return_less_the_noisier_they_are():
    def total(seed, noise):
        env = fresh()
        return sum(env.step(reply)[1] for _, reply in demonstrate(seed, noise))

    returns = [np.mean([total(seed, noise) for seed in range(100)]) for noise in (0.0, 0.2, 0.5)]
    assert returns == sorted(returns, reverse=True)
