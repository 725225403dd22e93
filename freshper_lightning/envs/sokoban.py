"""Sokoban in text: push every box onto a target."""

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from freshper_lightning.envs import sokoban_levels as xsb
from freshper_lightning.envs.frames import BLUE, BROWN, GRAY, GREEN, RED, WHITE, Figure, Picture
from freshper_lightning.envs.grid import REPLY_RULE, Cell, GridGame, imperfect_play, isolate
from freshper_lightning.envs.protocol import spoken
from freshper_lightning.envs.sokoban_generator import LevelSettings, draw_level, solutions
from freshper_lightning.envs.sokoban_levels import Level, read_xsb, within_walls

SYMBOLS = {
    xsb.WALL: "#",
    xsb.FLOOR: "_",
    xsb.TARGET: "O",
    xsb.BOX: "X",
    xsb.BOX_ON_TARGET: "√",
    xsb.PLAYER: "P",
    xsb.PLAYER_ON_TARGET: "S",
}
"""What the policy sees for each symbol of XSB, as in FreshPER."""

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0

_TARGET, _BOX, _PLAYER = Figure(RED, 0.3), Figure(BROWN, 0.75, round=False), Figure(BLUE, 0.6)


class Sokoban(GridGame):
    """Solving the level terminates; until then it can be made unsolvable, and the game goes on.

    A turn is worth -0.1, +1 for a box that comes onto a target, -1 for one that leaves it and +10 when all are on
    targets: one box on its target after k turns makes 11 - 0.1 k. A move against a wall, or against a box that cannot
    be pushed, changes nothing. Rules and rewards after gym-sokoban and FreshPER; the levels are our own.

    A level depends on the seed of ``reset`` alone, an even seed never gives walls and targets of an odd one, and no
    level starts with a box on a target. ``levels`` draws from a file instead, every seed from all of it: to hold levels
    out, evaluate on another file.

    Args:
        rows: Rows, outer walls included, from 5 to 16.
        columns: Columns, likewise.
        boxes: Boxes and targets, 1 or 2.
        min_moves: Fewest moves of a level's shortest solution.
        max_moves: Most moves of it, at most ``max_turns``, which is the default.
        max_turns: Replies per episode, at least 1.
        levels: XSB file to draw levels from; what is said above about levels has no effect then.
        render_mode: ``rgb_array``, ``ansi`` or nothing.

    Raises:
        ValueError: An argument is out of range, there is no such level or the file holds none; the message names it.
    """

    pictures: ClassVar = {
        "#": Picture(GRAY),
        "_": Picture(WHITE),
        "O": Picture(WHITE, (_TARGET,)),
        "X": Picture(WHITE, (_BOX,)),
        "√": Picture(WHITE, (Figure(GREEN, 0.75, round=False), _TARGET)),
        "P": Picture(WHITE, (_PLAYER,)),
        "S": Picture(WHITE, (_PLAYER, _TARGET)),
    }

    def __init__(
        self,
        rows: int = 6,
        columns: int = 6,
        boxes: int = 1,
        min_moves: int = 3,
        max_moves: int | None = None,
        max_turns: int = 10,
        levels: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if max_moves is not None and max_moves > max_turns:
            raise ValueError(f"max_moves must be at most max_turns {max_turns}, not {max_moves}")
        self.levels = () if levels is None else _read_levels(levels)
        if not self.levels:
            longest = max_turns if max_moves is None else max_moves
            self.settings = LevelSettings(rows, columns, boxes, min_moves, longest)
            for parity in (0, 1):
                draw_level(self.settings, parity)
        self.level: Level
        cells = max((level.layout.rows * level.layout.columns for level in self.levels), default=rows * columns)
        super().__init__(max_turns, cells, render_mode)

    def instruction(self) -> str:
        """The rules as the policy is told them; depends on the configuration, not on the instance."""
        return (
            "Sokoban: P is you, # is a wall, _ is floor, X is a box, O is a target, "
            "√ is a box on a target, S is you on a target.\n"
            "Each turn, move one cell: Left, Down, Right or Up. A move into a box pushes it, "
            "unless a wall or a box is behind it. Boxes cannot be pulled.\n"
            f"Pushing every box onto a target within {self.max_turns} turns ends the game with reward 10; "
            "a box onto a target is worth 1, off it -1, and every turn -0.1.\n"
            f"{REPLY_RULE}"
        )

    @property
    def instances(self) -> frozenset[str]:
        """The levels of the file, each as XSB text within its outer walls; empty where levels are generated."""
        return frozenset("\n".join(within_walls(level)) for level in self.levels)

    @property
    def position(self) -> Cell:
        """Where the player stands."""
        return self.level.player

    @property
    def won(self) -> bool:
        """Whether every box is on a target."""
        return self.level.solved

    def rows(self) -> list[str]:
        """The map, one symbol per cell."""
        return ["".join(SYMBOLS[symbol] for symbol in row) for row in self.level.rows()]

    def optimal_action(self) -> str | None:
        """First action of a shortest solution, or nothing where there is none any more.

        Raises:
            ValueError: The level has too many positions to search.
        """
        return solutions(self.level.layout).optimal_action(self.level)

    def _draw_instance(self, seed: int | None) -> None:
        if self.levels:
            self.level = self.levels[int(self.np_random.integers(len(self.levels)))]
        else:
            self.level = draw_level(self.settings, int(self.np_random.integers(2**62)) if seed is None else seed)

    def _play(self, move: str | None) -> float:
        before = self.level.on_target
        if move is not None:
            self.level = self.level.moved(move)
        gained = BOX_REWARD * (self.level.on_target - before)
        return STEP_REWARD + gained + SOLVED_REWARD * self.level.solved


@cache
def _read_levels(path: str) -> tuple[Level, ...]:
    levels = read_xsb(path)
    for number, level in enumerate(levels, start=1):
        if level.solved:
            raise ValueError(f"levels={path!r}: level {number} is solved already; there must be something to play")
    return levels


ISOLATE = isolate(Sokoban.pictures)
"""What a tokenizer should keep in tokens of their own."""


def demonstrate(seed: int, noise: float, **kwargs: Any) -> list[tuple[str, str]]:
    """One episode of :func:`~freshper_lightning.envs.grid.imperfect_play` in the game that ``kwargs`` configure."""
    return imperfect_play(Sokoban(**kwargs), seed, noise)


def corpus(n: int, seed: int, **kwargs: Any) -> Iterator[str]:
    """Everything said in ``n`` episodes of random play, for training a tokenizer."""
    return spoken(turn for episode in range(seed, seed + n) for turn in demonstrate(episode, 1.0, **kwargs))
