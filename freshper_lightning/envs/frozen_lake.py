"""FrozenLake in text: walk over the ice to the goal without falling into a hole."""

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from freshper_lightning.envs.frames import BLACK, BLUE, GREEN, ICE, Figure, Picture
from freshper_lightning.envs.grid import ACTIONS, REPLY_RULE, Cell, GridGame, beside, imperfect_play, isolate
from freshper_lightning.envs.protocol import spoken

PLAYER, FROZEN, HOLE, GOAL = "P", "_", "O", "G"
PLAYER_IN_HOLE, PLAYER_ON_GOAL = "X", "√"

MAX_DRAWS = 10_000
"""Maps that are drawn for one lake before its settings are taken to be impossible."""

_PLAYER = Figure(BLUE, 0.6)
_HOLE = Figure(BLACK, 0.9)

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
        row, column = beside(cell, action)
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
        """0 or 1, by a hash of holes and goal: in lakes of different parity no position is ever the same.

        The start is left out, since another way through the same holes passes there.
        """
        return zlib.crc32(repr((self.size, sorted(self.holes), self.goal)).encode()) & 1


def draw_lake(size: int, hole_probability: float, rng: np.random.Generator, parity: int | None = None) -> Lake:
    """Draw cells, start and goal independently and uniformly, again and again until the goal can be reached.

    With a ``parity``, lakes of the other one are drawn again as well.

    Raises:
        ValueError: None of that parity came; maps of this kind are too few.
    """
    for _ in range(MAX_DRAWS):
        holes = {(int(row), int(column)) for row, column in np.argwhere(rng.random((size, size)) < hole_probability)}
        start, goal = (divmod(int(index), size) for index in rng.choice(size * size, size=2, replace=False))
        lake = Lake(size, frozenset(holes - {start, goal}), start, goal)
        if start in lake.distances() and parity in (None, lake.parity()):
            return lake
    raise ValueError(
        f"size={size}, hole_probability={hole_probability}: no map of {'training' if parity == 0 else 'evaluation'} in "
        f"{MAX_DRAWS} draws; a larger size has more maps, a smaller hole_probability more ways to the goal"
    )


class FrozenLake(GridGame):
    """The player starts on ice and the goal is reachable; reward is 1 for the move onto the goal and 0 otherwise.

    Entering a hole or the goal terminates. The map and, where the ice is slippery, every slip depend on the seed of
    ``reset`` alone, and an even seed never gives holes and goal of an odd one: maps are few, and training and held-out
    seeds differ in parity. Rules after Gymnasium's FrozenLake, with random start, goal and map as in FreshPER.

    Args:
        size: Rows and columns, at least 2.
        hole_probability: Probability of each cell to be a hole before the map is drawn again for reachability.
        slippery: Whether a move goes as intended or to either of its sides with probability 1/3 each.
        max_turns: Replies per episode, at least 1.
        render_mode: ``rgb_array``, ``ansi`` or nothing.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    pictures: ClassVar = {
        PLAYER: Picture(ICE, (_PLAYER,)),
        FROZEN: Picture(ICE),
        HOLE: Picture(ICE, (_HOLE,)),
        GOAL: Picture(GREEN),
        PLAYER_IN_HOLE: Picture(ICE, (_HOLE, _PLAYER)),
        PLAYER_ON_GOAL: Picture(GREEN, (_PLAYER,)),
    }

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
        for parity in (0, 1):
            draw_lake(size, hole_probability, np.random.default_rng(0), parity)
        self.size, self.hole_probability, self.slippery = size, hole_probability, slippery
        self.lake: Lake
        self.player: Cell
        super().__init__(max_turns, size * size, render_mode)

    def instruction(self) -> str:
        """The rules as the policy is told them; depends on the configuration, not on the instance."""
        slip = f"\n{SLIPPERY_RULE}" if self.slippery else ""
        return (
            f"Frozen lake, {self.size} by {self.size} cells: P is you, _ is ice, O is a hole, G is the goal.\n"
            f"Each turn, move one cell: Left, Down, Right or Up. A move off the map has no effect.{slip}\n"
            f"Reaching the goal within {self.max_turns} turns ends the game with reward 1; "
            f"entering a hole ends it with 0.\n{REPLY_RULE}"
        )

    @property
    def position(self) -> Cell:
        """Where the player stands."""
        return self.player

    @property
    def won(self) -> bool:
        """Whether the player stands on the goal."""
        return self.player == self.lake.goal

    @property
    def lost(self) -> bool:
        """Whether the player is in a hole."""
        return self.player in self.lake.holes

    def rows(self) -> list[str]:
        """The map, one symbol per cell."""
        return ["".join(self._symbol((row, column)) for column in range(self.size)) for row in range(self.size)]

    def optimal_action(self) -> str:
        """First action of a shortest way from where the player stands."""
        return self.lake.optimal_action(self.player)

    def _draw_instance(self, seed: int | None) -> None:
        parity = None if seed is None else seed % 2
        self.lake = draw_lake(self.size, self.hole_probability, self.np_random, parity)
        self.player = self.lake.start

    def _play(self, move: str | None) -> float:
        if move is not None:
            self.player = self.lake.moved(self.player, self._slipped(move))
        return float(self.won)

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return PLAYER_IN_HOLE if self.lost else PLAYER_ON_GOAL if self.won else PLAYER
        return HOLE if cell in self.lake.holes else GOAL if cell == self.lake.goal else FROZEN

    def _slipped(self, move: str) -> str:
        if not self.slippery:
            return move
        return ACTIONS[(ACTIONS.index(move) + int(self.np_random.integers(-1, 2))) % len(ACTIONS)]


ISOLATE = isolate(FrozenLake.pictures)
"""What a tokenizer should keep in tokens of their own."""


def demonstrate(seed: int, noise: float, **kwargs: Any) -> list[tuple[str, str]]:
    """One episode of :func:`~freshper_lightning.envs.grid.imperfect_play` on the lake that ``kwargs`` configure."""
    return imperfect_play(FrozenLake(**kwargs), seed, noise)


def corpus(n: int, seed: int, **kwargs: Any) -> Iterator[str]:
    """Everything said in ``n`` episodes of random play, for training a tokenizer."""
    return spoken(turn for episode in range(seed, seed + n) for turn in demonstrate(episode, 1.0, **kwargs))
