import numpy as np
import pytest
from gymnasium import register

from freshper_lightning.envs.frozen_lake import FrozenLake
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.inspection.pictures import LINE, MARGIN, PAPER, draw, page, strip
from freshper_lightning.inspection.playback import has_frames, play_again
from freshper_lightning.inspection.text import conversation
from freshper_lightning.rollout.collector import EnvironmentConfig
from tests.envs.grids import TASKS
from tests.inspection.episodes import played

LAKE = EnvironmentConfig("freshper/FrozenLake-v0", {"size": 3, "hole_probability": 0.0, "max_turns": 5})
REPLIES = ["<answer>Up</answer>", "Hm.", "<answer>Left</answer>", "<answer>Down</answer>", "<answer>Up</answer>"]
FRAMED = {name: EnvironmentConfig(*TASKS[name]) for name in TASKS if name != "sokoban_hard"}


class Fickle(FrozenLake):
    """Whatever the seed, every other reset has another map."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        Fickle.resets += 1
        return super().reset(seed=seed + 2 * (Fickle.resets % 2), options=options)


class Moody(FrozenLake):
    """Rewards fall from one process to the next."""

    mood = 1.0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward + Moody.mood, *rest


class Plain(FrozenLake):
    """Declares frames, and has no argument that asks for them."""

    def __init__(self):
        super().__init__(**LAKE.kwargs)


register("tests/Plain-v0", Plain)
register("tests/Open-v0", lambda **kwargs: FrozenLake(**kwargs))
register("tests/Fickle-v0", Fickle)
register("tests/Moody-v0", Moody)


@pytest.mark.parametrize("name", FRAMED)
def test_an_episode_that_is_played_again_has_the_frames_of_each_turn(chat, name):
    environment = FRAMED[name]
    trajectory = played(chat, environment, REPLIES)
    moments = play_again(trajectory, chat, environment)
    assert len(moments) == trajectory.num_turns + 1
    env = make_text_env(environment.id, {**environment.kwargs, "render_mode": "rgb_array"})
    env.reset(seed=trajectory.seed)
    np.testing.assert_array_equal(moments[0].frame, env.render())
    for moment, reply in zip(moments[1:], REPLIES, strict=False):
        env.step(reply)
        np.testing.assert_array_equal(moment.frame, env.render())
        assert moment.reply == reply
    assert [moment.step.reward for moment in moments[1:]] == pytest.approx(trajectory.rewards.tolist())


@pytest.mark.parametrize("widest", [100, 500, 5000])
def test_a_strip_has_every_frame_in_its_place(chat, widest):
    moments = play_again(played(chat, LAKE, REPLIES), chat, LAKE)
    picture = np.asarray(strip(moments, widest))
    side, factor = moments[0].frame.shape[0], 4
    columns = max(1, min(len(moments), (widest - MARGIN) // (factor * side + MARGIN)))
    assert picture.shape[1] == columns * (factor * side + MARGIN) + MARGIN
    for turn, moment in enumerate(moments):
        left = MARGIN + turn % columns * (factor * side + MARGIN)
        top = MARGIN + turn // columns * (factor * side + 3 * LINE + MARGIN)
        shown = picture[top : top + factor * side, left : left + factor * side]
        np.testing.assert_array_equal(shown[::factor, ::factor], moment.frame)
        below = picture[top + factor * side :, left : left + factor * side][: 3 * LINE]
        assert (below != PAPER).any(), "a caption"
    assert (picture[:, :MARGIN] == PAPER).all()


def test_an_environment_without_frames_is_drawn_as_text(chat):
    environment = EnvironmentConfig("tests.loop:tests/HashScore-v0")
    trajectory = played(chat, environment, ["first", "second", "third"])
    assert not has_frames(environment)
    assert has_frames(LAKE)
    picture = draw(trajectory, chat, environment)
    blocks = list(conversation(trajectory, chat.tokenizer))
    assert picture == page(blocks)
    assert (np.asarray(picture)[:, -MARGIN:] == PAPER).all(), "no line is cut off"
    assert picture.height == LINE * sum(len(block.lines(80)) for block in blocks) + 2 * MARGIN
    other = played(chat, environment, ["other", "second", "third"])
    assert draw(other, chat, environment).tobytes() != picture.tobytes()


def test_frames_take_an_argument_that_asks_for_them(chat):
    environment = EnvironmentConfig("tests/Plain-v0")
    assert not has_frames(environment)
    assert has_frames(EnvironmentConfig("tests/Open-v0", LAKE.kwargs))
    trajectory = played(chat, environment, REPLIES)
    assert draw(trajectory, chat, environment) == page(conversation(trajectory, chat.tokenizer))


@pytest.mark.parametrize(
    ("environment", "now", "message"),
    [
        (
            EnvironmentConfig("tests/Fickle-v0"),
            None,
            "at the beginning the conversation goes on with .* not determinis",
        ),
        (LAKE, EnvironmentConfig(LAKE.id, LAKE.kwargs | {"max_turns": 4}), "at the beginning the conversation"),
        (LAKE, EnvironmentConfig("freshper/Sokoban-v0"), "'freshper/Sokoban-v0' must be 'freshper/FrozenLake-v0'"),
    ],
)
def test_an_episode_that_comes_out_otherwise_is_refused(chat, environment, now, message):
    trajectory = played(chat, environment, REPLIES)
    with pytest.raises(ConfigurationError, match=message):
        play_again(trajectory, chat, now or environment)


def test_a_turn_that_is_worth_something_else_is_refused(chat, monkeypatch):
    environment = EnvironmentConfig("tests/Moody-v0", LAKE.kwargs)
    trajectory = played(chat, environment, REPLIES)
    monkeypatch.setattr(Moody, "mood", 0.5)
    with pytest.raises(ConfigurationError, match=r"after turn 1 the reward is .*, but what is stored is 1"):
        play_again(trajectory, chat, environment)
