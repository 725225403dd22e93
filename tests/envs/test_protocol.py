import gymnasium
import pytest
from gymnasium.spaces import Discrete, Text

from freshper_lightning.envs.protocol import ReplySpace, make_text_env, parse_answer

ACTIONS = ("Left", "Right")


class Numbers(gymnasium.Env):
    observation_space, action_space = Discrete(3), Text(4)


class Annotated(gymnasium.Env):
    observation_space, action_space = Text(4), Text(4)

    def __init__(self, render_mode: str = None, turns: "a number of turns" = 3):  # noqa: F722, RUF013
        pass


class Defaults(Annotated):
    def __init__(self, render_mode: str = None):  # noqa: RUF013
        pass


class Buttons(gymnasium.Env):
    observation_space, action_space = Text(4), Discrete(3)


gymnasium.register("freshper-test/Numbers-v0", Numbers)
gymnasium.register("freshper-test/Buttons-v0", Buttons)
gymnasium.register("freshper-test/Annotated-v0", Annotated)
gymnasium.register("freshper-test/Defaults-v0", Defaults)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<answer>Left</answer>", "Left"),
        ("I think so.\n<answer>\n  rIGHT </answer> done", "Right"),
        ("<answer>Left</answer><answer>Right</answer>", None),
        ("<answer>Right</answer> or <answer>Left</answer>", None),
        ("<answer>Stay</answer><answer>Right</answer>", None),
        ("<answer>Left or Right</answer>", None),
        ("<answer><answer>Left</answer>", None),
        ("<answer></answer>", None),
        ("Left", None),
        ("<answer>Left", None),
        ("", None),
    ],
)
def test_there_must_be_one_answer_that_is_a_known_action(reply, action):
    assert parse_answer(reply, ACTIONS) == action


def test_a_reply_may_be_any_text_but_nothing_else():
    space = ReplySpace()
    assert all(reply in space for reply in ("", "√ ünïcode 你好", "x" * 10_000, space.sample()))
    assert 3 not in space


def test_an_unknown_id_is_refused_with_the_nearest_ones():
    with pytest.raises(ValueError, match=r"'freshper/FrozenLak-v0'.*did you mean .*freshper/FrozenLake-v0"):
        make_text_env("freshper/FrozenLak-v0", {})


def test_an_id_like_no_other_is_refused_with_our_own():
    with pytest.raises(ValueError, match=r"'qqqq'.*freshper/FrozenLake-v0"):
        make_text_env("qqqq", {})


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no_such_module"):
        make_text_env("no_such_module:Env-v0", {})


def test_an_id_may_name_the_module_that_registers_it():
    assert make_text_env("freshper_lightning.envs:freshper/FrozenLake-v0", {"size": 3}).reset(seed=0)[0]


def test_an_unknown_argument_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"holes.*hole_probability"):
        make_text_env("freshper/FrozenLake-v0", {"holes": 0.1})


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("FrozenLake", {"max_turns": 2.5}, r"FrozenLake-v0 cannot be made: max_turns=2\.5 must be of type int"),
        ("FrozenLake", {"max_turns": float("nan")}, "max_turns=nan must be of type int"),
        ("FrozenLake", {"max_turns": None}, "max_turns=None must be of type int"),
        ("FrozenLake", {"size": "4"}, "size='4' must be of type int"),
        ("FrozenLake", {"size": True}, "size=True must be of type int"),
        ("FrozenLake", {"slippery": "false"}, "slippery='false' must be of type bool"),
        ("FrozenLake", {"hole_probability": "0.2"}, r"hole_probability='0\.2' must be of type float"),
        ("Sokoban", {"max_moves": 9.5}, r"max_moves=9\.5 must be of type int or null"),
        ("Sokoban", {"levels": 3}, "levels=3 must be of type str or null"),
        ("CliffWalking", {"max_turns": 1e2}, "max_turns=100.0 must be of type int"),
        ("Arithmetic", {"attempts": 1.5}, r"attempts=1\.5 must be of type int"),
    ],
)
def test_an_argument_of_another_type_is_refused_with_the_right_one(env_id, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_text_env(f"freshper/{env_id}-v0", kwargs)


def test_what_an_argument_allows_is_accepted():
    assert make_text_env("freshper/FrozenLake-v0", {"hole_probability": 0, "slippery": True, "render_mode": None})
    assert make_text_env("freshper/Sokoban-v0", {"max_moves": None, "max_turns": 12})
    assert make_text_env("freshper-test/Defaults-v0", {"render_mode": None})
    assert make_text_env("freshper-test/Annotated-v0", {"render_mode": None, "turns": 4})


@pytest.mark.parametrize("name", ["Numbers", "Buttons"])
def test_an_environment_that_does_not_speak_text_is_refused(name):
    space = "observation_space" if name == "Numbers" else "action_space"
    with pytest.raises(ValueError, match=rf"{name}-v0 has {space} Discrete\(3\).*gymnasium.spaces.Text"):
        make_text_env(f"freshper-test/{name}-v0", {})


def test_gymnasiums_own_frozen_lake_is_refused():
    with pytest.raises(ValueError, match=r"gymnasium\.spaces\.Text"):
        make_text_env("FrozenLake-v1", {})
