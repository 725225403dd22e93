"""The task as an environment of one turn."""

from typing import Any

import gymnasium
from gymnasium.spaces import Text

from benchmarks.trainer.task import prompt, reward
from freshper_lightning.envs.protocol import ReplySpace

ID = "benchmarks/OneTurn-v0"


class OneTurn(gymnasium.Env[str, str]):
    """One message and one reply, whose letters are counted."""

    observation_space = Text(200)
    action_space = ReplySpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The message of the instance that ``seed`` names."""
        super().reset(seed=seed)
        return prompt(0 if seed is None else seed), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The end."""
        return "", reward(action), True, False, {}


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=OneTurn)
