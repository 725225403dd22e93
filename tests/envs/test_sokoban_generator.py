import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.envs import sokoban_generator
from freshper_lightning.envs.grid import ACTIONS
from freshper_lightning.envs.sokoban_generator import LevelSettings, Solutions, carve, draw_level, solutions
from freshper_lightning.envs.sokoban_levels import parse_level
from freshper_lightning.rollout.seeds import (
    demonstration_instance_seed,
    evaluation_instance_seed,
    training_instance_seed,
)
from tests.envs.grids import solve

SIMPLE = LevelSettings()
HARD = LevelSettings(10, 10, 2, 15, 50)


def check_levels(wanted, seeds):
    """Solved forwards, by another program: exactly as long as reverse play said, and as was asked for."""
    lengths = Counter()
    for seed in seeds:
        level = draw_level(wanted, seed)
        shortest = solve(level)
        assert wanted.min_moves <= shortest <= wanted.max_moves
        assert shortest == solutions(level.layout).length(level)
        assert level.on_target == 0
        assert len(level.boxes) == wanted.boxes
        assert parse_level(level.rows()) == level
        lengths[shortest] += 1
    return lengths


def test_a_solver_proves_a_thousand_simple_levels():
    assert len(check_levels(SIMPLE, range(1000))) >= 6


def test_a_solver_proves_hard_levels():
    assert len(check_levels(HARD, range(20))) >= 4


@pytest.mark.slow
def test_a_solver_proves_a_thousand_hard_levels():
    check_levels(HARD, range(1000))


@given(st.integers(5, 8), st.integers(5, 8), st.integers(1, 2), st.integers(0, 2**63 - 1))
@settings(max_examples=25, deadline=None)
def test_levels_of_every_size_are_as_asked(rows, columns, boxes, seed):
    wanted = LevelSettings(rows, columns, boxes, 2, 12)
    check_levels(wanted, [seed])
    level = draw_level(wanted, seed)
    assert (level.layout.rows, level.layout.columns) == (rows, columns)


def test_every_position_has_the_length_that_forward_search_finds():
    level = parse_level(["######", "#@  ##", "# $$ #", "#.  .#", "######"])
    table = Solutions(level.layout)
    rng = random.Random(0)
    found = set()
    for _ in range(300):
        if level.solved:
            level = parse_level(["######", "#@  ##", "# $$ #", "#.  .#", "######"])
        level = level.moved(rng.choice(ACTIONS))
        assert table.length(level) == solve(level)
        found.add(table.length(level))
    assert None in found
    assert len(found) > 3


def test_following_optimal_actions_takes_the_shortest_solution():
    for wanted, seeds in ((SIMPLE, range(100)), (HARD, range(10))):
        for seed in seeds:
            level = draw_level(wanted, seed)
            shortest, moves = solutions(level.layout).length(level), 0
            while not level.solved:
                level, moves = level.moved(solutions(level.layout).optimal_action(level)), moves + 1
            assert moves == shortest


def test_a_level_that_cannot_be_solved_has_no_length_and_no_action():
    level = parse_level(["#####", "#$  #", "#@ .#", "#####"])
    assert solutions(level.layout).length(level) is None
    assert solutions(level.layout).optimal_action(level) is None


def test_a_level_is_determined_by_its_seed_and_kept():
    first = [draw_level(SIMPLE, seed) for seed in range(50)]
    assert all(draw_level(SIMPLE, seed) is level for seed, level in enumerate(first))
    draw_level.cache_clear()
    solutions.cache_clear()
    assert [draw_level(SIMPLE, seed) for seed in range(50)] == first
    assert len(set(first)) > 45


def test_training_and_held_out_seeds_never_share_walls_and_targets():
    trained = {
        draw_level(SIMPLE, training_instance_seed(0, iteration, group))
        for iteration in range(60)
        for group in range(16)
    }
    demonstrated = {draw_level(SIMPLE, demonstration_instance_seed(0, episode)) for episode in range(300)}
    held_out = {draw_level(SIMPLE, evaluation_instance_seed(0, index)) for index in range(300)}
    assert len(held_out) > 280
    seen = {level.layout for level in trained | demonstrated}
    assert not seen & {level.layout for level in held_out}
    assert {level.layout.parity() for level in held_out} == {1}
    assert {layout.parity() for layout in seen} == {0}


def test_the_floor_is_inside_and_in_one_piece():
    for seed in range(200):
        floor = set(carve(7, 9, np.random.default_rng(seed)))
        assert all(0 < row < 6 and 0 < column < 8 for row, column in floor)
        seen, frontier = set(), [next(iter(floor))]
        while frontier:
            row, column = cell = frontier.pop()
            if cell in floor - seen:
                seen.add(cell)
                frontier += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        assert seen == floor


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 4}, "rows.*5 to 16.*4"),
        ({"columns": 20}, "columns.*5 to 16.*20"),
        ({"boxes": 0}, "boxes.*1 or 2.*0"),
        ({"boxes": 3}, "boxes.*1 or 2.*3"),
        ({"min_moves": 0}, "min_moves.*max_moves 10.*0"),
        ({"min_moves": 11}, "min_moves.*max_moves 10.*11"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        LevelSettings(**fields)


def test_settings_that_no_level_fulfils_are_refused_after_many_layouts(monkeypatch):
    monkeypatch.setattr(sokoban_generator, "MAX_LAYOUTS", 20)
    with pytest.raises(ValueError, match=r"no level of rows=5.*min_moves=90.*fewer moves"):
        draw_level(LevelSettings(5, 5, 1, 90, 100), 0)


def test_too_many_positions_are_refused_before_they_are_listed():
    rows = ["#" * 16, *["#" + " " * 14 + "#"] * 13, "#@" + "$" * 6 + "." * 6 + "  #", "#" * 16]
    with pytest.raises(ValueError, match=r"6 boxes has more than .* positions"):
        Solutions(parse_level(rows).layout)
