"""CliffWalking in text: along the edge of a cliff to the goal; there is only one instance."""

from collections.abc import Iterator
from typing import Any, ClassVar

from freshper_lightning.envs.frames import BLACK, BLUE, GREEN, WHITE, Figure, Picture
from freshper_lightning.envs.grid import REPLY_RULE, Cell, GridGame, beside, imperfect_play, isolate
from freshper_lightning.envs.protocol import spoken

ROWS, COLUMNS = 4, 12
START: Cell = (ROWS - 1, 0)
GOAL: Cell = (ROWS - 1, COLUMNS - 1)

STEP_REWARD, CLIFF_REWARD = -1.0, -100.0
OPTIMAL_RETURN = -13.0
"""Return of the shortest way: up, eleven times right, down; the step onto the goal costs 1 as every other one."""

PLAYER, GROUND, CLIFF, GOAL_SYMBOL, PLAYER_ON_GOAL = "P", "_", "C", "G", "√"

_PLAYER = Figure(BLUE, 0.6)


def is_cliff(cell: Cell) -> bool:
    """Whether ``cell`` is one of those between start and goal."""
    return cell[0] == ROWS - 1 and 0 < cell[1] < COLUMNS - 1


def moved(cell: Cell, action: str) -> Cell:
    """Where ``action`` leads from ``cell``, the cliff included; a move off the map stays."""
    row, column = beside(cell, action)
    return (row, column) if 0 <= row < ROWS and 0 <= column < COLUMNS else cell


class CliffWalking(GridGame):
    """Reaching the goal terminates; the best return is -13 (:data:`OPTIMAL_RETURN`).

    Every turn is worth -1, and a step onto the cliff -100 and the way back to the start. The one instance does not
    depend on the seed, so that training and evaluation play the same game. Rules after Sutton and Barto, Reinforcement
    Learning, second edition, example 6.6, and Gymnasium's CliffWalking; the bound on the turns is ours.

    Args:
        max_turns: Replies per episode, at least 1.
        render_mode: ``rgb_array``, ``ansi`` or nothing.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    pictures: ClassVar = {
        PLAYER: Picture(WHITE, (_PLAYER,)),
        GROUND: Picture(WHITE),
        CLIFF: Picture(BLACK),
        GOAL_SYMBOL: Picture(GREEN),
        PLAYER_ON_GOAL: Picture(GREEN, (_PLAYER,)),
    }

    def __init__(self, max_turns: int = 40, render_mode: str | None = None) -> None:
        self.player: Cell
        super().__init__(max_turns, ROWS * COLUMNS, render_mode)

    def instruction(self) -> str:
        """The rules as the policy is told them."""
        return (
            f"Cliff walking, {ROWS} by {COLUMNS} cells: P is you, _ is ground, C is the cliff, G is the goal.\n"
            "Each turn, move one cell: Left, Down, Right or Up. A move off the map has no effect.\n"
            f"Every turn costs 1, up to {self.max_turns} turns; reaching the goal ends the game. "
            "A step onto the cliff costs 100 and takes you back to the start.\n"
            f"{REPLY_RULE}"
        )

    @property
    def position(self) -> Cell:
        """Where the player stands."""
        return self.player

    @property
    def won(self) -> bool:
        """Whether the player stands on the goal."""
        return self.player == GOAL

    def rows(self) -> list[str]:
        """The map, one symbol per cell."""
        return ["".join(self._symbol((row, column)) for column in range(COLUMNS)) for row in range(ROWS)]

    def optimal_action(self) -> str:
        """First action of a shortest way from where the player stands."""
        if self.player[1] == GOAL[1]:
            return "Down"
        return "Up" if self.player == START else "Right"

    def _draw_instance(self, seed: int | None) -> None:
        self.player = START

    def _play(self, move: str | None) -> float:
        ahead = self.player if move is None else moved(self.player, move)
        self.player = START if is_cliff(ahead) else ahead
        return CLIFF_REWARD if is_cliff(ahead) else STEP_REWARD

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return PLAYER_ON_GOAL if self.won else PLAYER
        return CLIFF if is_cliff(cell) else GOAL_SYMBOL if cell == GOAL else GROUND


ISOLATE = isolate(CliffWalking.pictures)
"""What a tokenizer should keep in tokens of their own."""


def demonstrate(seed: int, noise: float, **kwargs: Any) -> list[tuple[str, str]]:
    """One episode of :func:`~freshper_lightning.envs.grid.imperfect_play` in the game that ``kwargs`` configure."""
    return imperfect_play(CliffWalking(**kwargs), seed, noise)


def corpus(n: int, seed: int, **kwargs: Any) -> Iterator[str]:
    """Everything said in ``n`` episodes of random play, for training a tokenizer."""
    return spoken(turn for episode in range(seed, seed + n) for turn in demonstrate(episode, 1.0, **kwargs))
