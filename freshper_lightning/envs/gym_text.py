"""Any gymnasium environment with few or textual actions, played in text."""

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete, Text

from freshper_lightning.envs.protocol import ReplySpace, check_arguments, creator_of, parse_answer, tagged_answer

Describe: TypeAlias = Callable[[gymnasium.Env[Any, Any], Any], str]
"""``describe(environment, observation)``: the observation as the policy is told it."""

OF_GYMNASIUM = ("max_episode_steps",)
"""Arguments of ``gymnasium.make`` itself that may stand among those of the environment."""

_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


class GymText(gymnasium.Env[str, str]):
    """The environment ``env_id`` with its own rules, rewards and seeds; a reply that gives no action changes nothing.

    A reply names its action in its one ``<answer>`` tag: one of ``actions`` for a discrete action space, any text of
    the space for a text space. An invalid reply costs a turn, at reward 0. The policy is told what ``describe`` says,
    else an observation that is text, else what the environment renders as ``ansi`` (highlighted cells in brackets,
    whatever their color), else the printed observation. Seeds of training and evaluation never meet, but instances may:
    an environment with few of them, or one, holds nothing out.

    Args:
        env_id: Id of the registered environment; ``module:Name-v0`` imports the module first.
        kwargs: Arguments of the environment, and gymnasium's ``max_episode_steps``.
        instruction: The rules, above the first observation; the names of the actions are added.
        actions: Name of each discrete action in order, without white space around it; their numbers by default.
        max_turns: Replies per episode, at least 1; what the environment itself allows may be less.
        success_return: Return from which on an episode is a success, whatever ends it; without it, what the
            environment's ``info`` says.
        describe: Import path of a function (environment, observation) -> text.

    Raises:
        ValueError: The spaces cannot be played in text, or an argument does not fit; the message names it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium declares it as an instance variable)

    def __init__(
        self,
        env_id: str,
        kwargs: dict[str, Any] | None = None,
        instruction: str = "",
        actions: list[str] | None = None,
        max_turns: int = 100,
        success_return: float | None = None,
        describe: str | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {max_turns}")
        if not isinstance(instruction, str):
            raise ValueError(f"instruction={instruction} must be text; in a config file a text with ': ' is a mapping")
        self.env = _make(env_id, kwargs or {})
        self.actions = _action_names(self.env.action_space, actions)
        self._describe = _describer(self.env, describe)
        self.instruction, self.max_turns, self.success_return = instruction, max_turns, success_return
        self.turns_left, self.total, self._shown = 0, 0.0, ""
        self.observation_space, self.action_space = ReplySpace(), ReplySpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Reset the environment with ``seed``, whose lower 31 bits it is given, and return rules and observation."""
        super().reset(seed=seed)
        observation, _ = self.env.reset(seed=None if seed is None else seed % 2**31, options=options)
        self.turns_left, self.total = self.max_turns, 0.0
        self._shown = self._describe(self.env, observation)
        parts = (self.instruction, self._form(), self._shown)
        return "\n\n".join(part for part in parts if part), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the action that the reply names, if it names one.

        Raises:
            gymnasium.error.ResetNeeded: The episode is over.
        """
        if self.turns_left <= 0:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset")
        chosen = self._chosen(action)
        self.turns_left -= 1
        reward, terminated, truncated = 0.0, False, False
        info: Mapping[str, Any] = {}
        if chosen is not None:
            observation, given, terminated, truncated, info = self.env.step(chosen)
            reward, self._shown = float(given), self._describe(self.env, observation)
        self.total += reward
        truncated = truncated or (not terminated and self.turns_left <= 0)
        if terminated or truncated:
            self.turns_left = 0
        told = f"Reward: {reward:g}\n{self._shown}" if chosen is not None else f"No action in the reply.\n{self._shown}"
        return told, reward, bool(terminated), bool(truncated), {"valid": chosen is not None} | self._verdict(info)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _form(self) -> str:
        if self.actions is None:
            return "Give your action as <answer>action</answer>."
        return f"Give one action as <answer>action</answer>: {', '.join(self.actions)}."

    def _chosen(self, reply: str) -> Any:
        space = self.env.action_space
        if isinstance(space, Discrete):
            assert self.actions is not None
            name = parse_answer(reply, self.actions)
            return None if name is None else int(space.start) + self.actions.index(name)
        assert isinstance(space, Text)
        answer = tagged_answer(reply, space.max_length)
        return answer if answer is not None and space.contains(answer) else None

    def _verdict(self, info: Mapping[str, Any]) -> dict[str, Any]:
        if self.success_return is not None:
            return {"success": self.total >= self.success_return}
        return {"success": info["success"]} if "success" in info else {}


def _make(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    spec = check_arguments(env_id, {name: value for name, value in kwargs.items() if name not in OF_GYMNASIUM})
    asked = {**_ansi(spec, kwargs), **kwargs}
    env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, disable_env_checker=True, **asked)
    return env


def _ansi(spec: EnvSpec, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The render mode ``ansi`` where the environment has it."""
    modes = getattr(creator_of(spec), "metadata", {}).get("render_modes", ())
    return {"render_mode": "ansi"} if "ansi" in modes and "render_mode" not in kwargs else {}


def _action_names(space: Any, actions: list[str] | None) -> tuple[str, ...] | None:
    if isinstance(space, Text) and actions is None:
        return None
    if not isinstance(space, Discrete):
        raise ValueError(f"action space {space} with actions={actions}: must be Discrete, or Text and without actions")
    names = tuple(actions or map(str, range(int(space.start), int(space.start + space.n))))
    if not all(isinstance(name, str) and name == name.strip() for name in names):
        raise ValueError(f"actions={list(names)} must be texts (in quotes: '1', 'yes') without white space around them")
    if len({name.casefold() for name in names}) != space.n or len(names) != space.n:
        raise ValueError(f"actions={list(names)} must be {space.n} different names")
    return names


def _describer(env: gymnasium.Env[Any, Any], path: str | None) -> Describe:
    if path is not None:
        return _imported(path)
    if isinstance(env.observation_space, Text):
        return lambda env, observation: str(observation)
    if env.render_mode == "ansi":
        return lambda env, observation: _HIGHLIGHTED.sub(r"[\1]", str(env.render())).strip("\n")
    if isinstance(env.observation_space, Box):
        raise ValueError(f"describe must name a function that puts observations of {env.observation_space} into words")
    return lambda env, observation: f"Observation: {observation}"


def _imported(path: str) -> Describe:
    module, _, name = path.rpartition(".")
    try:
        function: Describe = getattr(importlib.import_module(module), name)
    except (ValueError, ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"describe={path!r} is not the import path of a function: {error}") from error
    return function
