"""What text games on a grid have in common: moves, turns, messages, frames, and demonstrations of imperfect play."""

import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from freshper_lightning.envs.frames import Frame, Picture, draw_frame
from freshper_lightning.envs.protocol import ReplySpace, parse_answer

Cell: TypeAlias = tuple[int, int]
"""Row and column, counted from the top left."""

MOVES: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""Every action with its change of row and column, in circular order: the neighbours of an action are its sides."""
ACTIONS = tuple(MOVES)

REPLY_RULE = "You may think first, then give one move as <answer>move</answer>; any other reply loses the turn."


def beside(cell: Cell, action: str) -> Cell:
    """The neighbour of ``cell`` that lies the way of ``action``, on the map or off it."""
    return cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]


class GridGame(gymnasium.Env[str, str], ABC):
    """One move per turn: a won or lost game terminates, and the last of ``max_turns`` turns truncates.

    A reply that names no move costs its turn as a move does, and changes nothing. The first message is the
    instruction and the map, each later one the reward and the map. Subclasses say what a move does; ``won`` and
    ``lost`` must not both be true.

    Args:
        max_turns: Replies per episode, at least 1.
        cells: Most cells of a map.
        render_mode: ``rgb_array`` makes :meth:`render` return a frame; ``ansi`` or nothing makes it return text.

    Raises:
        ValueError: ``max_turns`` or ``render_mode`` is not allowed.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 1}  # noqa: RUF012  (gymnasium's declaration)
    pictures: ClassVar[Mapping[str, Picture]]
    """Every symbol of a cell, with its picture."""

    def __init__(self, max_turns: int, cells: int, render_mode: str | None) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {max_turns}")
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"render_mode must be one of {', '.join(modes)} or None, not {render_mode!r}")
        self.max_turns, self.render_mode = max_turns, render_mode
        self.turns_left = max_turns
        charset = frozenset(string.ascii_letters + string.digits + string.punctuation + " \n").union(self.pictures)
        self.observation_space = Text(len(self.instruction()) + 2 * cells + 64, charset=charset)
        self.action_space = ReplySpace()

    @abstractmethod
    def instruction(self) -> str:
        """The rules as the policy is told them; depends on the configuration, not on the instance."""

    @abstractmethod
    def rows(self) -> list[str]:
        """The map, one symbol per cell."""

    @abstractmethod
    def optimal_action(self) -> str | None:
        """First action of a shortest way to win, or nothing where there is no such way any more."""

    @property
    @abstractmethod
    def position(self) -> Cell:
        """Where the player stands; a turn was effective if and only if it changed this."""

    @property
    @abstractmethod
    def won(self) -> bool:
        """Whether the game is won."""

    @property
    def lost(self) -> bool:
        """Whether the game is lost before its turns are used up."""
        return False

    @abstractmethod
    def _draw_instance(self, seed: int | None) -> None:
        """Set up the instance that ``seed`` determines, or one drawn with ``np_random``."""

    @abstractmethod
    def _play(self, move: str | None) -> float:
        """Make the move, or none; the turn's reward."""

    @property
    def over(self) -> bool:
        """Whether the episode has ended; only :meth:`reset` goes on from there."""
        return self.won or self.lost or self.turns_left <= 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Set up the instance that ``seed`` determines and return instruction and map."""
        super().reset(seed=seed)
        self._draw_instance(seed)
        self.turns_left = self.max_turns
        return f"{self.instruction()}\n{self._board()}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the move that the reply names, if it names one.

        Raises:
            gymnasium.error.ResetNeeded: The episode is over.
        """
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset")
        move = parse_answer(action, ACTIONS)
        before = self.position
        reward = self._play(move)
        self.turns_left -= 1
        terminated = self.won or self.lost
        info = {"valid": move is not None, "effective": self.position != before, "success": self.won}
        observation = f"Reward: {reward:g}\n{self._board()}"
        return observation, reward, terminated, not terminated and self.turns_left <= 0, info

    def render(self) -> str | Frame:
        """The map: an RGB frame, or one line per row with cells separated by blanks."""
        return draw_frame(self.rows(), self.pictures) if self.render_mode == "rgb_array" else self._map()

    def _map(self) -> str:
        return "\n".join(" ".join(row) for row in self.rows())

    def _board(self) -> str:
        return f"{self._map()}\nTurns left: {self.turns_left}"


def imperfect_play(env: GridGame, seed: int, noise: float) -> list[tuple[str, str]]:
    """One episode: the user message and the reply of each turn, until it is over or cannot be won any more.

    Each move is optimal with probability ``1 - noise`` and uniformly random otherwise, by the seed alone.

    Raises:
        ValueError: ``noise`` is not in [0, 1].
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be in [0, 1], not {noise}")
    rng = np.random.default_rng([seed, 1])
    observation, _ = env.reset(seed=seed)
    turns: list[tuple[str, str]] = []
    while not env.over and (optimal := env.optimal_action()) is not None:
        action = str(rng.choice(ACTIONS)) if rng.random() < noise else optimal
        reply = f"<answer>{action}</answer>"
        turns.append((observation, reply))
        observation = env.step(reply)[0]
    return turns


def isolate(symbols: Iterable[str]) -> str:
    """Regular expression of what a tokenizer should keep in tokens of their own.

    Those are map cells of ``symbols`` (with the blank or newline ahead), actions and digits.
    """
    return rf"[ \n]?[{''.join(symbols)}](?=[ \n]|$)|{'|'.join(ACTIONS)}|\d"
