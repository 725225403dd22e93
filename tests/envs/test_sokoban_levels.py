import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.envs.grid import ACTIONS
from freshper_lightning.envs.sokoban_generator import LevelSettings, draw_level
from freshper_lightning.envs.sokoban_levels import parse_level, read_xsb, write_xsb

FILE = """\
Title: two levels
; the first one

  ####
###  ####
#     $ #
# #  #$ #
# . .#@ #
#########
Author: nobody

#######
#-_.*+#
#-$_$-#
#######
"""


def level(*rows):
    return parse_level(rows)


def after(start, *actions):
    for action in actions:
        start = start.moved(action)
    return start.rows()


def test_every_symbol_is_read_for_what_it_is():
    read = level("######", "#@$. #", "# *+ #".replace("+", "."), "#  $ #", "######")
    assert read.player == (1, 1)
    assert read.boxes == {(1, 2), (2, 2), (3, 3)}
    assert read.layout.targets == {(1, 3), (2, 2), (2, 3)}
    assert (1, 4) not in read.layout.walls
    assert read.on_target == 1


def test_a_player_on_a_target_is_both():
    read = level("#####", "#+$ #", "#####")
    assert read.player in read.layout.targets
    assert read.rows() == ["#####", "#+$ #", "#####"]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_move_goes_to_free_floor_and_not_into_walls(action):
    free = level("#####", "#   #", "# @ #", "# $.#", "#####")
    if action != "Down":
        assert free.moved(action).player != free.player
        assert free.moved(action).boxes == free.boxes
    closed = level("#####", "#$@##", "#.###", "#####")
    assert closed.moved(action) is closed


def test_a_push_moves_one_box_and_the_player():
    assert after(level("######", "#@$ .#", "######"), "Right") == ["######", "# @$.#", "######"]
    assert after(level("######", "#@$ .#", "######"), "Right", "Right") == ["######", "#  @*#", "######"]


def test_two_boxes_in_a_row_and_a_box_at_a_wall_cannot_be_pushed():
    start = level("#######", "#@$$..#", "#######")
    assert start.moved("Right") is start
    stuck = level("#####", "#.@$#", "#####")
    assert stuck.moved("Right") is stuck


def test_a_box_is_never_pulled():
    assert after(level("######", "# @$.#", "######"), "Left") == ["######", "#@ $.#", "######"]


def test_a_box_leaves_its_target_and_the_player_takes_it():
    start = level("######", "#@* $#", "#   .#", "######")
    assert start.on_target == 1
    assert start.moved("Right").on_target == 0
    assert after(start, "Right") == ["######", "# +$$#", "#   .#", "######"]


def test_a_level_is_solved_when_every_box_is_on_a_target():
    assert not level("#####", "#@*$#", "#. ##", "#####").solved
    assert level("#####", "#@**#", "#####").solved


def test_a_file_may_have_titles_comments_and_other_symbols_for_floor(tmp_path):
    (tmp_path / "levels.txt").write_text(FILE)
    first, second = read_xsb(tmp_path / "levels.txt")
    assert first.layout.rows == 6
    assert first.layout.columns == 9
    assert first.boxes == {(2, 6), (3, 6)}
    assert second.rows() == ["#######", "#  .*+#", "# $ $ #", "#######"]


def test_a_box_that_rests_on_its_target_may_be_out_of_reach():
    assert level("########", "#@$.##*#", "########").moved("Right").solved


def test_cells_outside_become_walls():
    read = level("  ####", "###  #", "#@$ .#", "######")
    assert read.rows() == ["######", "###  #", "#@$ .#", "######"]


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=5), st.booleans())
@settings(max_examples=30, deadline=None)
def test_written_levels_are_read_back_as_they_were(tmp_path_factory, seeds, hard):
    wanted = LevelSettings(10, 10, 2, 15, 50) if hard else LevelSettings()
    levels = tuple(draw_level(wanted, seed) for seed in seeds)
    path = tmp_path_factory.mktemp("xsb") / "levels.xsb"
    write_xsb(path, levels)
    assert read_xsb(path) == levels


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["#####", "# $.#", "#####"], "0 players, 1 boxes and 1 targets"),
        (["#####", "#@@$.#", "#####"], "2 players"),
        (["#####", "#@$ #", "#####"], "1 boxes and 0 targets"),
        (["######", "#@$..#", "######"], "1 boxes and 2 targets"),
        (["#####", "#@$. ", "#####"], "gap at row 1, column 4"),
        (["#####", "#@$.#"], "gap at row 1"),
        (["#####", "#@x.#", "#####"], "not 'x'"),
        (["########", "#@  #$.#", "########"], "cannot get to the box or target in row 1, column 5"),
        (["########", "#@$ # .#", "########"], "cannot get to the box or target in row 1, column 6"),
    ],
)
def test_what_is_no_level_is_refused_with_the_reason(rows, message):
    with pytest.raises(ValueError, match=message):
        parse_level(rows)


def test_a_file_that_holds_no_level_or_a_bad_one_is_refused_by_name_and_line(tmp_path):
    with pytest.raises(ValueError, match=r"levels='.*none.txt' is not a file"):
        read_xsb(tmp_path / "none.txt")
    (tmp_path / "prose.txt").write_text("No level here.\n")
    with pytest.raises(ValueError, match=r"prose.txt' holds no level"):
        read_xsb(tmp_path / "prose.txt")
    (tmp_path / "bad.txt").write_text("; one\n#####\n#@$ #\n#####\n")
    with pytest.raises(ValueError, match=r"bad.txt', from line 2: .*1 boxes and 0 targets"):
        read_xsb(tmp_path / "bad.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Title #1\n#####\n#@x$.#\n#####\n", "from line 2: .*0 players.*; line 3 is no part of it.* symbols 'x'$"),
        ("#####\n#@$.#\n##?##\n", r"gap at row 1, column 1; line 3 is no part of it.* symbols '\?'$"),
        ("t#####\n#@$.#\n#####\n", "gap at row 0, column 1; line 1 is no part of it.* symbols 't'$"),
        ("Level #2\n#####\n#@$ #\n#####\nAuthor: #1 fan\n", "1 boxes and 0 targets$"),
        ("#####\n#@\xff.#\n#####\n", "line 2 is not UTF-8, which it must be: byte 0xff in column 3$"),
    ],
)
def test_a_row_with_a_wrong_symbol_is_named_and_titles_are_not(tmp_path, text, message):
    (tmp_path / "levels.txt").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_xsb(tmp_path / "levels.txt")


def test_a_byte_order_mark_is_no_symbol(tmp_path):
    (tmp_path / "levels.txt").write_text("#####\n#@$.#\n#####\n", encoding="utf-8-sig")
    (read,) = read_xsb(tmp_path / "levels.txt")
    assert read.rows() == ["#####", "#@$.#", "#####"]
