import re

import numpy as np
import pytest

from freshper_lightning.envs.sokoban import Sokoban, demonstrate
from freshper_lightning.envs.sokoban_generator import LevelSettings, draw_level
from freshper_lightning.envs.sokoban_levels import parse_level, within_walls, write_xsb
from tests.envs.grids import answer, board

HARD = {"rows": 10, "columns": 10, "boxes": 2, "min_moves": 15, "max_turns": 50}


def placed(*rows, **kwargs):
    """An environment in a chosen state."""
    env = Sokoban(**kwargs)
    env.reset(seed=0)
    env.level = parse_level(rows)
    return env


def rewards(env, *actions):
    return [env.step(answer(action))[1] for action in actions]


def test_a_move_and_a_push_off_targets_cost_a_tenth():
    assert rewards(placed("#######", "# @$ .#", "#######"), "Left", "Right", "Right") == [-0.1] * 3


def test_a_box_onto_its_target_is_worth_one_and_off_it_minus_one():
    env = placed("########", "#@$. .$#", "#      #", "########")
    assert rewards(env, "Right", "Right") == pytest.approx([0.9, -1.1])


def test_a_push_from_one_target_to_another_changes_nothing_in_the_count():
    assert rewards(placed("########", "#@*. $ #", "########"), "Right") == pytest.approx([-0.1])


def test_the_last_box_onto_its_target_gives_ten_more_and_ends_the_episode():
    env = placed("#####", "#@$.#", "#####")
    observation, reward, terminated, truncated, info = env.step(answer("right"))
    assert reward == pytest.approx(10.9)
    assert (terminated, truncated) == (True, False)
    assert info == {"valid": True, "effective": True, "success": True}
    assert observation == "Reward: 10.9\n# # # # #\n# _ P √ #\n# # # # #\nTurns left: 9"


@pytest.mark.parametrize("turn", range(1, 11))
def test_one_box_solved_at_turn_k_makes_eleven_minus_a_tenth_of_k(turn):
    env = placed("######", "# @$.#", "######")
    total = sum(env.step("pass")[1] for _ in range(turn - 1)) + env.step(answer("Right"))[1]
    assert total == pytest.approx(11 - 0.1 * turn)
    assert env.over


def test_an_unsolved_game_makes_minus_one_in_ten_turns():
    env = placed("#####", "#@$.#", "#####")
    assert sum(rewards(env, *["Left"] * 10)) == pytest.approx(-1.0)
    assert env.over
    assert not env.won


def test_two_boxes_make_twelve_without_the_cost_of_turns():
    env = placed("######", "#@$.##", "#  $.#", "######")
    assert sum(rewards(env, "Right", "Left", "Down", "Right", "Right")) == pytest.approx(12 - 0.5)
    assert env.won


@pytest.mark.parametrize("reply", ["", "Left", "<answer>Push</answer>", "<answer>Right", "<answer>Right, Up</answer>"])
def test_an_invalid_reply_costs_as_a_move_does_and_changes_nothing(reply):
    env = placed("#####", "#@$.#", "#####")
    before = env.level
    _, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert info == {"valid": False, "effective": False, "success": False}
    assert env.level == before


def test_a_blocked_move_is_valid_without_effect():
    env = placed("#####", "#.@$#", "#####")
    _, reward, _, _, info = env.step(answer("Right"))
    assert reward == -0.1
    assert info == {"valid": True, "effective": False, "success": False}


def test_an_unsolvable_game_goes_on_to_its_last_turn():
    env = placed("######", "#@$ ##", "#  . #", "######")
    env.step(answer("Right"))
    assert env.optimal_action() is None
    assert not env.over


def test_solving_on_the_last_turn_terminates_and_is_not_truncated():
    env = placed("#####", "#@$.#", "#####", max_turns=1, min_moves=1)
    assert env.step(answer("Right"))[2:4] == (True, False)


def test_the_player_on_a_target_is_shown_as_both():
    env = placed("######", "#@.$.#", "#  $ #", "######")
    assert board(env.step(answer("Right"))[0])[1] == ["#", "_", "S", "X", "O", "#"]


@pytest.mark.parametrize("kwargs", [{}, HARD])
def test_the_instruction_describes_what_is_shown_and_nothing_else(kwargs):
    env = Sokoban(**kwargs)
    described = re.findall(r"(\S) (?:is|are) (?:a |the )?(?:you|wall|floor|box|target)", env.instruction())
    assert sorted(described) == sorted("P#_XO√S")
    shown = {
        cell
        for seed in range(40)
        for observation, _ in demonstrate(seed, 0.5, **kwargs)
        for row in board(observation)
        for cell in row
    }
    assert shown <= set(described)
    assert shown >= set("P#_XO")
    assert f"within {env.max_turns} turns" in env.instruction()


def test_an_observation_shows_the_level_of_the_seed():
    env = Sokoban(**HARD)
    rows = board(env.reset(seed=8)[0])
    symbols = str.maketrans(" .$*@+", "_OX√PS")
    level = draw_level(LevelSettings(10, 10, 2, 15, 50), 8)
    assert ["".join(row) for row in rows] == [row.translate(symbols) for row in level.rows()]


def test_levels_of_a_file_are_drawn_uniformly_by_seed(tmp_path):
    levels = [draw_level(LevelSettings(), seed) for seed in range(4)]
    write_xsb(tmp_path / "four.xsb", levels)
    env = Sokoban(levels=str(tmp_path / "four.xsb"), max_turns=12)
    drawn = []
    for seed in range(200):
        observation, _ = env.reset(seed=seed)
        assert observation in env.observation_space
        drawn.append(levels.index(env.level))
    assert (np.bincount(drawn) > 25).all()
    env.reset(seed=0)
    assert levels.index(env.level) == drawn[0]
    assert env.instances == {"\n".join(within_walls(level)) for level in levels}
    assert not Sokoban().instances


def test_a_level_is_the_same_instance_whatever_surrounds_it(tmp_path):
    drawings = ("#####\n#@$.#\n#####", "  #####\n  #@$.##\n  ######", "#######\n#######\n##@$.##\n#######")
    for number, drawing in enumerate(drawings):
        (tmp_path / f"{number}.xsb").write_text(drawing)
    names = [Sokoban(levels=str(tmp_path / f"{number}.xsb")).instances for number in range(3)]
    assert names == [{"@$."}] * 3


def test_a_file_that_cannot_be_read_or_played_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"levels='nowhere.xsb' is not a file"):
        Sokoban(levels="nowhere.xsb")
    write_xsb(tmp_path / "solved.xsb", [parse_level(["####", "#@*#", "####"])])
    with pytest.raises(ValueError, match=r"solved.xsb': level 1 is solved already"):
        Sokoban(levels=str(tmp_path / "solved.xsb"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rows": 3}, "rows.*3"),
        ({"boxes": 5}, "boxes.*5"),
        ({"max_moves": 11}, "max_moves.*max_turns 10.*11"),
        ({"min_moves": 11}, "min_moves.*11"),
        ({"rows": 5, "columns": 5, "min_moves": 45, "max_turns": 50}, "rows=5, columns=5, boxes=1.*min_moves=45"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Sokoban(**kwargs)


def test_demonstrations_succeed_less_the_noisier_they_are_and_stop_where_nothing_wins():
    def outcome(seed, noise):
        env = Sokoban()
        env.reset(seed=seed)
        for _, reply in demonstrate(seed, noise):
            env.step(reply)
        assert env.over or env.optimal_action() is None
        return env.won

    rates = [np.mean([outcome(seed, noise) for seed in range(200)]) for noise in (0.0, 0.3, 0.6, 1.0)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.2
