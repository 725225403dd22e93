"""FrozenLake in text: walk over the ice to the goal without falling into a hole."""

import string
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from freshper_lightning.envs.protocol import ReplySpace, parse_answer

Cell: TypeAlias = tuple[int, int]
"""Row and column, counted from the top left."""

MOVES: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""Every action with its change of row and column, in circular order: the neighbours of an action are its sides."""
ACTIONS = tuple(MOVES)

PLAYER, ICE, HOLE, GOAL = "P", "_", "O", "G"
PLAYER_IN_HOLE, PLAYER_ON_GOAL = "X", "√"
SYMBOLS = PLAYER + ICE + HOLE + GOAL + PLAYER_IN_HOLE + PLAYER_ON_GOAL

ISOLATE = rf"[ \n]?[{SYMBOLS}](?=[ \n]|$)|{'|'.join(ACTIONS)}|\d"
"""What a tokenizer should keep in tokens of their own: map cells (with the blank or newline ahead), actions, digits."""

SLIPPERY_RULE = "The ice is slippery: a move goes as intended or to either of its two sides, with probability 1/3 each."


@dataclass(frozen=True, slots=True)
class Lake:
    """One instance: the goal can be reached from the start without entering a hole, and they are two cells."""

    size: int
    holes: frozenset[Cell]
    start: Cell
    goal: Cell

    def moved(self, cell: Cell, action: str) -> Cell:
        """Where ``action`` leads from ``cell``; a move off the map stays."""
        row, column = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def distances(self) -> dict[Cell, int]:
        """Moves to the goal by the shortest way, for every cell from which it can be reached."""
        found = {self.goal: 0}
        frontier = deque([self.goal])
        while frontier:
            cell = frontier.popleft()
            for action in ACTIONS:
                neighbour = self.moved(cell, action)
                if neighbour not in found and neighbour not in self.holes:
                    found[neighbour] = found[cell] + 1
                    frontier.append(neighbour)
        return found

    def optimal_action(self, cell: Cell) -> str:
        """First action, in the order of ``ACTIONS``, of a shortest way to the goal on ice that is not slippery."""
        distances = self.distances()
        return min(ACTIONS, key=lambda action: distances.get(self.moved(cell, action), self.size**2))

    def parity(self) -> int:
        """0 or 1, by a hash of the map: lakes of different parity are never the same map."""
        return zlib.crc32(repr((self.size, sorted(self.holes), self.start, self.goal)).encode()) & 1


def draw_lake(size: int, hole_probability: float, rng: np.random.Generator, parity: int | None = None) -> Lake:
    """Draw cells, start and goal independently and uniformly, again and again until the goal can be reached.

    With a ``parity``, lakes of the other one are drawn again as well.
    """
    while True:
        holes = {(int(row), int(column)) for row, column in np.argwhere(rng.random((size, size)) < hole_probability)}
        start, goal = (divmod(int(index), size) for index in rng.choice(size * size, size=2, replace=False))
        lake = Lake(size, frozenset(holes - {start, goal}), start, goal)
        if start in lake.distances() and parity in (None, lake.parity()):
            return lake


class FrozenLake(gymnasium.Env[str, str]):
    """The player starts on ice and the goal is reachable; reward is 1 for the move onto the goal and 0 otherwise.

    Entering a hole or the goal terminates; the last of ``max_turns`` turns truncates. A reply that names no move costs
    its turn and changes nothing. The map and, where the ice is slippery, every slip depend on the seed of ``reset``
    alone, and an even seed never gives the map of an odd one: maps are few, and training and held-out seeds differ in
    parity. Rules after Gymnasium's FrozenLake, with random start, goal and map as in FreshPER.

    Args:
        size: Rows and columns, at least 2.
        hole_probability: Probability of each cell to be a hole before the map is drawn again for reachability.
        slippery: Whether a move goes as intended or to either of its sides with probability 1/3 each.
        max_turns: Replies per episode, at least 1.
        render_mode: ``ansi`` or nothing; :meth:`render` returns the map as text in both cases.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (gymnasium declares it as an instance variable)

    def __init__(
        self,
        size: int = 4,
        hole_probability: float = 0.2,
        slippery: bool = False,
        max_turns: int = 10,
        render_mode: str | None = None,
    ) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2, not {size}")
        if not 0 <= hole_probability <= 1:
            raise ValueError(f"hole_probability must be in [0, 1], not {hole_probability}")
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {max_turns}")
        self.size, self.hole_probability, self.slippery = size, hole_probability, slippery
        self.max_turns, self.render_mode = max_turns, render_mode
        self.lake: Lake
        self.player: Cell
        self.turns_left = max_turns
        charset = frozenset(string.ascii_letters + string.digits + string.punctuation + " \n" + SYMBOLS)
        self.observation_space = Text(len(self.instruction()) + 2 * size * size + 64, charset=charset)
        self.action_space = ReplySpace()

    def instruction(self) -> str:
        """The rules as the policy is told them; depends on the configuration, not on the instance."""
        slip = f"\n{SLIPPERY_RULE}" if self.slippery else ""
        return (
            f"Frozen lake, {self.size} by {self.size} cells: P is you, _ is ice, O is a hole, G is the goal.\n"
            f"Each turn, move one cell: Left, Down, Right or Up. A move off the map has no effect.{slip}\n"
            f"Reaching the goal within {self.max_turns} turns ends the game with reward 1; "
            "entering a hole ends it with 0.\n"
            "You may think first, then give one move as <answer>move</answer>; any other reply loses the turn."
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the instance that ``seed`` determines and return instruction and map."""
        super().reset(seed=seed)
        parity = None if seed is None else seed % 2
        self.lake = draw_lake(self.size, self.hole_probability, self.np_random, parity)
        self.player = self.lake.start
        self.turns_left = self.max_turns
        return f"{self.instruction()}\n{self._board()}", {}

    @property
    def over(self) -> bool:
        """Whether the episode has ended; only :meth:`reset` goes on from there."""
        return self.player == self.lake.goal or self.player in self.lake.holes or self.turns_left == 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the move that the reply names, if it names one.

        Raises:
            gymnasium.error.ResetNeeded: The episode is over.
        """
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset")
        move = parse_answer(action, ACTIONS)
        before = self.player
        if move is not None:
            self.player = self.lake.moved(before, self._slipped(move))
        self.turns_left -= 1
        success = self.player == self.lake.goal
        terminated = success or self.player in self.lake.holes
        info = {"valid": move is not None, "effective": self.player != before, "success": success}
        observation = f"Reward: {int(success)}\n{self._board()}"
        return observation, float(success), terminated, not terminated and self.turns_left == 0, info

    def render(self) -> str:
        """The map: one line per row, cells separated by blanks."""
        return "\n".join(
            " ".join(self._symbol((row, column)) for column in range(self.size)) for row in range(self.size)
        )

    def optimal_action(self) -> str:
        """First action of a shortest way from where the player stands."""
        return self.lake.optimal_action(self.player)

    def _board(self) -> str:
        return f"{self.render()}\nTurns left: {self.turns_left}"

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return PLAYER_IN_HOLE if cell in self.lake.holes else PLAYER_ON_GOAL if cell == self.lake.goal else PLAYER
        return HOLE if cell in self.lake.holes else GOAL if cell == self.lake.goal else ICE

    def _slipped(self, move: str) -> str:
        if not self.slippery:
            return move
        return ACTIONS[(ACTIONS.index(move) + int(self.np_random.integers(-1, 2))) % len(ACTIONS)]


def demonstrate(seed: int, noise: float, **kwargs: Any) -> list[tuple[str, str]]:
    """One episode of imperfect play: the user message and the reply of each turn.

    Each move is optimal with probability ``1 - noise`` and uniformly random otherwise, by the seed alone; ``kwargs``
    are those of :class:`FrozenLake`.

    Raises:
        ValueError: ``noise`` is not in [0, 1].
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be in [0, 1], not {noise}")
    env = FrozenLake(**kwargs)
    rng = np.random.default_rng([seed, 1])
    observation, _ = env.reset(seed=seed)
    turns = []
    while not env.over:
        action = str(rng.choice(ACTIONS)) if rng.random() < noise else env.optimal_action()
        reply = f"<answer>{action}</answer>"
        turns.append((observation, reply))
        observation = env.step(reply)[0]
    return turns


def corpus(n: int, seed: int, **kwargs: Any) -> Iterator[str]:
    """Everything said in ``n`` episodes of random play, for training a tokenizer.

    Messages come apart, headed by their role on a line of its own, as templates in the style of ChatML show them;
    the head of a reply comes alone, because it is part of the prompt.
    """
    for episode in range(n):
        for observation, reply in demonstrate(seed + episode, 1.0, **kwargs):
            yield f"user\n{observation}"
            yield "assistant\n"
            yield reply
