"""Sokoban levels by reverse play: from all solved positions of a layout backwards, which gives exact solutions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from freshper_lightning.envs.grid import ACTIONS, Cell, beside
from freshper_lightning.envs.sokoban_levels import Layout, Level

Positions = NDArray[np.int64]
"""One row per position: the floor index of the player, then those of the boxes, ascending."""

MAX_POSITIONS = 2**26
"""Bound on the entries of a table of solutions: floor cells to the power of boxes + 1."""

MAX_LAYOUTS = 10_000
"""Layouts that are drawn for one level before its settings are taken to be impossible."""


class Solutions:
    """Moves of the shortest solution of every position of ``layout``, exact; -1 where there is none.

    Breadth-first from every solved position (boxes on the targets, player anywhere), against the rules: the player
    steps back, with or without pulling the box that is ahead.

    Raises:
        ValueError: The layout has too many positions to list.
    """

    def __init__(self, layout: Layout) -> None:
        floor = layout.floor()
        self._floor, self._index = floor, {cell: number for number, cell in enumerate(floor)}
        self._layout = layout
        shape = (len(floor),) * (1 + len(layout.targets))
        if len(floor) ** len(shape) > MAX_POSITIONS:
            raise ValueError(
                f"a level of {len(floor)} floor cells and {len(layout.targets)} boxes has more than {MAX_POSITIONS} "
                "positions: too many to search; use fewer boxes or a smaller level"
            )
        wall = len(floor)
        self._beside = np.array(
            [[self._index.get(beside(cell, action), wall) for cell in floor] + [wall] for action in ACTIONS]
        )
        self._moves = np.full(shape, -1, dtype=np.int16)
        self._search()

    def _search(self) -> None:
        frontier, moves = self._solved(), 0
        while len(frontier):
            self._moves[tuple(frontier.T)] = moves
            before = np.concatenate(list(self._predecessors(frontier)))
            before[:, 1:].sort(axis=1)
            new = before[self._moves[tuple(before.T)] < 0]
            frontier, moves = np.unique(new, axis=0), moves + 1

    def _solved(self) -> Positions:
        targets = sorted(self._index[cell] for cell in self._layout.targets)
        players = np.setdiff1d(np.arange(len(self._floor)), targets)
        return np.column_stack([players, np.tile(targets, (len(players), 1))])

    def _predecessors(self, positions: Positions) -> Iterator[Positions]:
        """Positions from which one move leads to ``positions``; their boxes may be out of order."""
        player, boxes = positions[:, :1], positions[:, 1:]
        for number in range(len(ACTIONS)):
            behind = self._beside[(number + 2) % len(ACTIONS)][player]
            free = ((behind != len(self._floor)) & (boxes != behind).all(axis=1, keepdims=True))[:, 0]
            yield np.hstack([behind, boxes])[free]
            pulled = boxes == self._beside[number][player]
            yield np.hstack([behind, np.where(pulled, player, boxes)])[free & pulled.any(axis=1)]

    def length(self, level: Level) -> int | None:
        """Moves of the shortest solution, or nothing where the level cannot be solved any more."""
        boxes = sorted(self._index[cell] for cell in level.boxes)
        moves = int(self._moves[(self._index[level.player], *boxes)])
        return None if moves < 0 else moves

    def optimal_action(self, level: Level) -> str | None:
        """First action, in the order of ``ACTIONS``, of a shortest solution of an unsolved level, if it has any."""
        moves = self.length(level)
        if moves is None:
            return None
        return next(action for action in ACTIONS if self.length(level.moved(action)) == moves - 1)

    def starts(self, shortest: int, longest: int) -> Positions:
        """Positions without a box on a target whose shortest solution has at least ``shortest`` and at most
        ``longest`` moves."""
        positions = np.argwhere((self._moves >= shortest) & (self._moves <= longest))
        targets = [self._index[cell] for cell in self._layout.targets]
        return positions[~np.isin(positions[:, 1:], targets).any(axis=1)]

    def level(self, position: NDArray[np.int64]) -> Level:
        """The level of one row of :data:`Positions`."""
        player, *boxes = (self._floor[index] for index in position)
        return Level(self._layout, frozenset(boxes), player)


@lru_cache(maxsize=16)
def solutions(layout: Layout) -> Solutions:
    """The table of a layout; the newest ones are kept."""
    return Solutions(layout)


@dataclass(frozen=True, slots=True)
class LevelSettings:
    """What levels are drawn: their size (outer walls included), their boxes and the moves of the shortest solution.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    rows: int = 6
    columns: int = 6
    boxes: int = 1
    min_moves: int = 3
    max_moves: int = 10

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            if not 5 <= value <= 16:
                raise ValueError(f"{name} must be from 5 to 16, not {value}")
        if not 1 <= self.boxes <= 2:
            raise ValueError(
                f"boxes must be 1 or 2, not {self.boxes}: with more, exact solutions take too long to find"
            )
        if not 1 <= self.min_moves <= self.max_moves:
            raise ValueError(f"min_moves must be from 1 to max_moves {self.max_moves}, not {self.min_moves}")


def carve(rows: int, columns: int, rng: np.random.Generator) -> list[Cell]:
    """Floor inside outer walls, connected: a random walk of 1.5 steps per cell inside, which mostly goes straight on
    and opens a cell beside it half of the time."""
    row, column = int(rng.integers(1, rows - 1)), int(rng.integers(1, columns - 1))
    floor, action = {(row, column)}, str(rng.choice(ACTIONS))
    for _ in range((rows - 2) * (columns - 2) * 3 // 2):
        if rng.random() < 0.5:
            action = str(rng.choice(ACTIONS))
        ahead = beside((row, column), action)
        if _is_inside(ahead, rows, columns):
            row, column = ahead
        floor.add((row, column))
        side = beside((row, column), str(rng.choice(ACTIONS)))
        if rng.random() < 0.5 and _is_inside(side, rows, columns):
            floor.add(side)
    return sorted(floor)


def _is_inside(cell: Cell, rows: int, columns: int) -> bool:
    return 0 < cell[0] < rows - 1 and 0 < cell[1] < columns - 1


def draw_layout(settings: LevelSettings, rng: np.random.Generator) -> Layout:
    """Carve the floor and draw targets on it, uniformly."""
    rows, columns = settings.rows, settings.columns
    floor = carve(rows, columns, rng)
    targets = rng.choice(len(floor), size=min(settings.boxes, len(floor)), replace=False)
    walls = {(row, column) for row in range(rows) for column in range(columns)}.difference(floor)
    return Layout(rows, columns, frozenset(walls), frozenset(floor[index] for index in targets))


@lru_cache(maxsize=4096)
def draw_level(settings: LevelSettings, seed: int) -> Level:
    """The level of a seed: solvable, no box on a target, and an even seed never gives walls and targets of an odd one.

    Layouts are drawn until one has the parity of ``seed`` and a position of the asked length; of those positions one is
    drawn uniformly.

    Raises:
        ValueError: No level was found; the settings ask for something that does not exist or is rare.
    """
    rng = np.random.default_rng(seed)
    for _ in range(MAX_LAYOUTS):
        layout = draw_layout(settings, rng)
        if layout.parity() != seed % 2:
            continue
        table = solutions(layout)
        starts = table.starts(settings.min_moves, settings.max_moves)
        if len(starts):
            return table.level(rng.choice(starts))
    raise ValueError(
        f"no level of rows={settings.rows}, columns={settings.columns}, boxes={settings.boxes} with a shortest "
        f"solution of min_moves={settings.min_moves} to max_moves={settings.max_moves} moves among {MAX_LAYOUTS} "
        "layouts; fewer moves or a larger level may give some"
    )
