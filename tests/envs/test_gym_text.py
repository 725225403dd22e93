import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, Text
from gymnasium.utils.env_checker import check_env

from freshper_lightning.envs.gym_text import GymText
from freshper_lightning.envs.protocol import make_text_env
from tests.envs.replies import malformed_replies

LAKE = {
    "env_id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["Left", "Down", "Right", "Up"],
    "success_return": 1.0,
}
WAY = ["Down", "Down", "Right", "Right", "Down", "Right"]


class Echo(gymnasium.Env):
    """Asks for a word of lower-case letters and rewards its length."""

    observation_space, action_space = Text(20), Text(5, charset="abcdefghijklmnopqrstuvwxyz")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say a word.", {}

    def step(self, action):
        return f"You said {action}.", len(action), False, False, {"success": action == "hello"}


class Picture(gymnasium.Env):
    observation_space, action_space = Box(0, 1, (2, 2)), Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), True, False, {}


gymnasium.register("freshper-test/Repeat-v0", Echo)
gymnasium.register("freshper-test/Picture-v0", Picture)


def describe_picture(env, observation):
    return f"a picture of {observation.size} cells"


def answer(text):
    return f"<answer>{text}</answer>"


def test_frozen_lake_of_gymnasium_is_won_by_its_way_in_text():
    env = GymText(**LAKE, instruction="Reach G.")
    observation, _ = env.reset(seed=0)
    assert observation.startswith("Reach G.\n\nGive one action as <answer>action</answer>: Left, Down, Right, Up.\n\n")
    assert observation.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    *steps, last = [env.step(answer(move)) for move in WAY]
    assert all(step[1:4] == (0.0, False, False) for step in steps)
    assert last[1:] == (1.0, True, False, {"valid": True, "success": True})
    assert last[0].endswith("HFF[G]")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(answer("Left"))


def test_an_invalid_reply_costs_a_turn_and_changes_nothing():
    env = GymText(**LAKE, max_turns=2)
    env.reset(seed=0)
    env.step(answer("Down"))
    told, reward, terminated, truncated, info = env.step(answer("Downwards"))
    assert told.startswith("No action in the reply.\n")
    assert told.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert (reward, terminated, truncated, info) == (0.0, False, True, {"valid": False, "success": False})


def test_ten_thousand_malformed_replies_neither_raise_nor_act():
    env = GymText(**LAKE, max_turns=10_001)
    before = env.reset(seed=0)[0].rpartition("\n\n")[2]
    for reply in malformed_replies(10_000, right="7"):
        told, reward, terminated, truncated, info = env.step(reply)
        assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False), reply[:200]
    assert told.endswith(before)


def test_equal_seeds_and_replies_give_equal_episodes_on_slippery_ice():
    def play(seed):
        env = GymText("FrozenLake-v1", {"is_slippery": True}, max_turns=5)
        told = [env.reset(seed=seed)[0]]
        while env.turns_left:
            told.append(env.step(answer("1"))[0])
        return told

    assert play(2**62 + 5) == play(2**62 + 5)
    assert len({tuple(play(seed)) for seed in range(20)}) > 1


def test_text_actions_are_taken_from_the_tag_if_the_space_has_them():
    env = GymText("freshper-test/Repeat-v0")
    assert env.reset(seed=0)[0] == "Give your action as <answer>action</answer>.\n\nSay a word."
    assert env.step(answer("hello")) == (
        "Reward: 5\nYou said hello.",
        5.0,
        False,
        False,
        {"valid": True, "success": True},
    )
    assert env.step(answer("HELLO"))[4] == {"valid": False}


def test_a_function_puts_other_observations_into_words():
    env = GymText("freshper-test/Picture-v0", describe="tests.envs.test_gym_text.describe_picture")
    assert env.reset(seed=0)[0].endswith(": 5, 6.\n\na picture of 4 cells")
    assert env.step(answer("6"))[1] == 6.0


def test_the_bound_of_gymnasium_may_stand_among_the_arguments():
    env = GymText(**{**LAKE, "kwargs": {**LAKE["kwargs"], "max_episode_steps": 2}})
    env.reset(seed=0)
    assert [env.step(answer("Left"))[3] for _ in range(2)] == [False, True]


def test_observations_of_few_numbers_are_printed():
    assert "Observation: (" in GymText("Blackjack-v1").reset(seed=0)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "Lake-v9"}, "environment id 'Lake-v9' is not registered; did you mean FrozenLake-v1"),
        ({**LAKE, "kwargs": {"bogus": 1}}, "cannot be made: .*'bogus'; its arguments are: render_mode"),
        ({"env_id": "no_such_module:Lake-v9"}, "no_such_module"),
        ({**LAKE, "actions": ["Left", "Down"]}, r"actions=\['Left', 'Down'\] must be 4 different names"),
        ({**LAKE, "actions": ["Left", "Down", "Up", "UP"]}, "4 different names"),
        ({**LAKE, "actions": ["Left ", "Down", "Right", "Up"]}, "must be texts .* without white space around them"),
        ({**LAKE, "actions": [0, 1, 2, 3]}, r"actions=\[0, 1, 2, 3\] must be texts"),
        ({**LAKE, "actions": [True, "Down", "Right", "Up"]}, "must be texts"),
        ({"env_id": "Pendulum-v1"}, "action space Box"),
        ({"env_id": "freshper-test/Picture-v0"}, "describe must name a function"),
        ({**LAKE, "describe": "tests.nothing"}, "describe='tests.nothing' is not the import path"),
        ({**LAKE, "max_turns": 0}, "max_turns must be at least 1"),
        ({**LAKE, "instruction": {"Goal": "G"}}, "instruction=.* must be text"),
    ],
)
def test_what_cannot_be_played_in_text_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GymText(**arguments)


def test_it_is_a_registered_environment_that_speaks_text():
    check_env(make_text_env("freshper/GymText-v0", LAKE).unwrapped, skip_render_check=True)
