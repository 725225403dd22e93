"""Playing a stored episode again, for the frames that it was not stored with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from freshper_lightning.envs.frames import Frame
from freshper_lightning.envs.protocol import TextEnv, make_text_env, takes_argument
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat, Conversation
from freshper_lightning.rollout.episode import Step
from freshper_lightning.trajectory import Trajectory

RGB = "rgb_array"


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What an environment showed at the beginning, or after a reply."""

    frame: Frame
    reply: str
    """Text of the reply, as the environment read it; empty at the beginning."""
    step: Step | None
    """What the environment made of the reply; None at the beginning."""


def has_frames(environment: EnvironmentConfig) -> bool:
    """Whether the environment can render RGB frames, and be asked for them.

    Raises:
        ValueError: It cannot be made.
    """
    with _made(environment, {}) as env:
        return RGB in env.metadata.get("render_modes", []) and takes_argument(environment.id, "render_mode")


def play_again(trajectory: Trajectory, chat: ChatFormat, environment: EnvironmentConfig) -> list[Moment]:
    """The beginning and each turn of an episode, played again from its instance seed with the replies that it has.

    Tokens and rewards come out as they are stored, or it is an error.

    Args:
        trajectory: The episode.
        chat: Of the run that collected it.
        environment: Of that run; it must be able to render RGB frames.

    Raises:
        ConfigurationError: The environment is another one, or says something else than it did.
    """
    if trajectory.task != environment.id:
        raise ConfigurationError(
            f"rollout.environment.id={environment.id!r} must be {trajectory.task!r}, in which the episode was played"
        )
    with _made(environment, {"render_mode": RGB}) as env:
        return list(_moments(env, trajectory, chat))


def _moments(env: TextEnv, trajectory: Trajectory, chat: ChatFormat) -> Iterator[Moment]:
    observation, info = env.reset(seed=trajectory.seed)
    conversation = Conversation(chat, observation, info.get("system"))
    yield Moment(_frame(env), "", None)
    for turn, (start, end) in enumerate(trajectory.turns.tolist()):
        _require_same(turn, conversation, trajectory, start)
        reply = conversation.add_reply(trajectory.token_ids[start:end].tolist())
        observation, reward, terminated, truncated, info = env.step(reply)
        step = Step.read(reward, info)
        stored = float(trajectory.rewards[turn])
        _require(turn, np.float32(step.reward) == np.float32(stored), f"the reward is {step.reward:g}", f"{stored:g}")
        yield Moment(_frame(env), reply, step)
        if turn + 1 < trajectory.num_turns:
            _require(turn, not (terminated or truncated), "the episode ends", "it goes on")
            conversation.add_user(observation)


def _require_same(turn: int, conversation: Conversation, trajectory: Trajectory, end: int) -> None:
    begin = int(trajectory.turns[turn - 1, 1]) if turn else 0
    said, stored = conversation.token_ids[begin:], trajectory.token_ids[begin:end].tolist()
    texts = [repr(conversation.chat.decode(ids, keep_special=True)) for ids in (said, stored)]
    _require(turn - 1, said == stored, f"the conversation goes on with {texts[0]}", texts[1])


def _require(turn: int, holds: bool | np.bool_, found: str, stored: str) -> None:
    """``turn`` is that of the last reply, -1 ahead of the first."""
    if not holds:
        place = f"after turn {turn + 1}" if turn >= 0 else "at the beginning"
        raise ConfigurationError(
            f"the episode cannot be played again: {place} {found}, but what is stored is {stored}; the environment is "
            "not deterministic (equal seeds and replies must give equal episodes), or is not as it was in the run"
        )


def _frame(env: TextEnv) -> Frame:
    frame = np.asarray(env.render())
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        raise ConfigurationError(
            f"render of the environment must return uint8 [height, width, 3], not {frame.dtype} {list(frame.shape)}"
        )
    return frame


@contextmanager
def _made(environment: EnvironmentConfig, more: dict[str, str]) -> Iterator[TextEnv]:
    env = make_text_env(environment.id, {**environment.kwargs, **more})
    try:
        yield env
    finally:
        env.close()
