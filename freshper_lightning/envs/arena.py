"""The games of TextArena for one player."""

import importlib
from typing import Any

import gymnasium

from freshper_lightning.envs.own_random import OwnRandom
from freshper_lightning.envs.protocol import ReplySpace


class TextArena(gymnasium.Env[str, str]):
    """A game of TextArena with one player, whose moves are whole replies; its final reward is that of the last turn.

    Success is a reward of at least 1. What the game says since the last move is the next user message. TextArena draws
    from the global generators of Python and NumPy; here each game has its own states of them, so that games played side
    by side do not disturb one another, nor what draws afterwards, and the seed of ``reset`` fixes all that is drawn.
    What draws from these generators in another thread while a game makes a move draws from the game's. Needs the extra
    ``textarena``.

    Args:
        game: Its id, such as ``GuessTheNumber-v0-raw``; ``-raw`` leaves out wrappers that repeat the conversation.
        kwargs: Arguments of the game.

    Raises:
        ValueError: TextArena is not installed, or has no such game for one player.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium declares it as an instance variable)

    def __init__(self, game: str, kwargs: dict[str, Any] | None = None) -> None:
        library = _library()
        self._action_type = library.ObservationType.PLAYER_ACTION
        self._random, self._over = OwnRandom(0), True
        try:
            with self._random.use():
                self._game = library.make(game, **(kwargs or {}))
                self._game.reset(num_players=1, seed=0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"game={game!r} with kwargs={kwargs or {}} is no game for one player: {error}") from error
        self.observation_space, self.action_space = ReplySpace(), ReplySpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the game that ``seed`` determines, and return its rules and first state."""
        super().reset(seed=seed)
        first = int(self.np_random.integers(2**31))
        self._random = OwnRandom(first)
        with self._random.use():
            self._game.reset(num_players=1, seed=first)
            self._over = False
            return self._said(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give the reply to the game.

        Raises:
            gymnasium.error.ResetNeeded: The game is over.
        """
        if self._over:
            raise gymnasium.error.ResetNeeded("the game is over; call reset")
        with self._random.use():
            self._over, _ = self._game.step(action)
            state = self._game.state
            if not self._over:
                return self._said(), 0.0, False, False, {"valid": state.error_count == 0, "success": False}
        reward = float((state.rewards or {0: 0.0})[0])
        valid = not state.game_info[0].get("invalid_move", False)
        return f"Reward: {reward:g}", reward, True, False, {"valid": valid, "success": reward >= 1}

    def _said(self) -> str:
        _, messages = self._game.get_observation()
        return "\n\n".join(str(text).strip() for _, text, kind in messages if kind != self._action_type)


def _library() -> Any:
    try:
        return importlib.import_module("textarena")
    except ModuleNotFoundError as error:
        raise ValueError("this environment needs the package textarena: pip install -e '.[textarena]'") from error
