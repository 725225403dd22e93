"""Sokoban's rules as pure functions of a level, and the XSB text format for levels."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from freshper_lightning.envs.grid import ACTIONS, Cell, beside
from freshper_lightning.text_file import read_lines

Cells: TypeAlias = frozenset[Cell]

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = "#", " ", ".", "$", "*", "@", "+"
XSB_SYMBOLS = WALL + FLOOR + TARGET + BOX + BOX_ON_TARGET + PLAYER + PLAYER_ON_TARGET
FLOOR_ALIASES = "-_"
"""Symbols that files have for floor where a blank could be lost."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What never changes in a level: walls close the floor off, targets lie on the floor, and there is one at least."""

    rows: int
    columns: int
    walls: Cells
    targets: Cells

    def floor(self) -> list[Cell]:
        """Cells without a wall, by row and column."""
        cells = ((row, column) for row in range(self.rows) for column in range(self.columns))
        return [cell for cell in cells if cell not in self.walls]

    def parity(self) -> int:
        """0 or 1, by a hash of walls and targets: in layouts of different parity no position is ever the same."""
        return zlib.crc32(repr((self.rows, self.columns, sorted(self.walls), sorted(self.targets))).encode()) & 1


@dataclass(frozen=True, slots=True)
class Level:
    """A position: the player and the boxes stand on different floor cells, and there are as many boxes as targets."""

    layout: Layout
    boxes: Cells
    player: Cell

    @property
    def solved(self) -> bool:
        """Whether every box is on a target."""
        return self.boxes == self.layout.targets

    @property
    def on_target(self) -> int:
        """Boxes that are on a target."""
        return len(self.boxes & self.layout.targets)

    def moved(self, action: str) -> "Level":
        """The position after ``action``, which pushes a box that is ahead; the same where a wall or a box blocks it."""
        ahead = beside(self.player, action)
        if ahead in self.layout.walls:
            return self
        if ahead not in self.boxes:
            return replace(self, player=ahead)
        behind = beside(ahead, action)
        if behind in self.layout.walls or behind in self.boxes:
            return self
        return replace(self, player=ahead, boxes=self.boxes - {ahead} | {behind})

    def symbol(self, cell: Cell) -> str:
        """What XSB has for ``cell``."""
        if cell in self.layout.walls:
            return WALL
        on_target = cell in self.layout.targets
        if cell in self.boxes:
            return BOX_ON_TARGET if on_target else BOX
        if cell == self.player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        return TARGET if on_target else FLOOR

    def rows(self) -> list[str]:
        """The level in XSB symbols, all rows equally long."""
        columns = range(self.layout.columns)
        return ["".join(self.symbol((row, column)) for column in columns) for row in range(self.layout.rows)]


def parse_level(rows: Iterable[str]) -> Level:
    """The level that rows of XSB symbols show; floor that the player cannot get to, boxes aside, becomes wall.

    Raises:
        ValueError: A symbol is unknown, or what is shown is no level; the message says why.
    """
    cells = {(row, column): symbol for row, line in enumerate(rows) for column, symbol in enumerate(line)}
    if unknown := set(cells.values()) - set(XSB_SYMBOLS + FLOOR_ALIASES):
        raise ValueError(f"a level has the symbols {XSB_SYMBOLS!r}, and not {''.join(sorted(unknown))!r}")
    players, boxes, targets = (
        frozenset(cell for cell, symbol in cells.items() if symbol in symbols)
        for symbols in (PLAYER + PLAYER_ON_TARGET, BOX + BOX_ON_TARGET, TARGET + BOX_ON_TARGET + PLAYER_ON_TARGET)
    )
    if len(players) != 1 or not targets or len(boxes) != len(targets):
        raise ValueError(
            "a level has one player, and as many boxes as targets, at least one; "
            f"not {len(players)} players, {len(boxes)} boxes and {len(targets)} targets"
        )
    (player,) = players
    inside = _inside(cells, player)
    if stranded := sorted((boxes ^ targets) - inside):
        row, column = stranded[0]
        raise ValueError(
            f"the player cannot get to the box or target in row {row}, column {column}, and never solves it"
        )
    floor = inside | boxes | targets
    size = 1 + max(row for row, _ in cells), 1 + max(column for _, column in cells)
    walls = frozenset((row, column) for row in range(size[0]) for column in range(size[1])) - floor
    return Level(Layout(*size, walls, targets), boxes, player)


def _inside(cells: dict[Cell, str], player: Cell) -> Cells:
    """The floor around the player, up to the walls."""
    found, frontier = {player}, [player]
    while frontier:
        cell = frontier.pop()
        for neighbour in (beside(cell, action) for action in ACTIONS):
            if neighbour not in cells:
                raise ValueError(f"walls must close a level off; there is a gap at row {cell[0]}, column {cell[1]}")
            if cells[neighbour] != WALL and neighbour not in found:
                found.add(neighbour)
                frontier.append(neighbour)
    return frozenset(found)


def read_xsb(path: str | Path) -> tuple[Level, ...]:
    """The levels of an XSB file, in their order; titles, comments and blank lines part them.

    Raises:
        ValueError: The file is not there, has no level, or one that is none; the message names file and line.
    """
    lines = [line.rstrip("\n") for line in read_lines(path, "levels", "a file of Sokoban levels in XSB format")]
    levels = tuple(_parse_file(str(path), lines))
    if not levels:
        raise ValueError(f"levels={str(path)!r} holds no level in XSB format")
    return levels


def _parse_file(path: str, lines: list[str]) -> Iterator[Level]:
    for is_map, block in groupby(enumerate(lines, start=1), key=lambda numbered: _is_map_row(numbered[1])):
        numbered = list(block)
        if not is_map:
            continue
        try:
            yield parse_level(line for _, line in numbered)
        except ValueError as error:
            first, last = numbered[0][0], numbered[-1][0]
            left_out = "".join(_left_out(lines, number) for number in (first - 1, last + 1))
            raise ValueError(f"levels={path!r}, from line {first}: {error}{left_out}") from error


def _left_out(lines: list[str], number: int) -> str:
    """What to say of a line beside a level that is none: a title, or a row of the level with a wrong symbol in it."""
    row = lines[number - 1].strip(FLOOR + FLOOR_ALIASES) if 1 <= number <= len(lines) else ""
    if WALL not in (row[:1], row[-1:]):
        return ""
    unknown = "".join(sorted(set(row) - set(XSB_SYMBOLS + FLOOR_ALIASES)))
    return f"; line {number} is no part of it, because no level has the symbols {unknown!r}"


def _is_map_row(line: str) -> bool:
    return WALL in line and set(line) <= set(XSB_SYMBOLS + FLOOR_ALIASES)


def within_walls(level: Level) -> list[str]:
    """The smallest rectangle of :meth:`Level.rows` with everything but walls in it: the same however wide those are."""
    rows = level.rows()
    for _ in range(2):  # rows, then columns, which are the rows of the transpose
        inside = [number for number, row in enumerate(rows) if set(row) != {WALL}]
        rows = ["".join(column) for column in zip(*rows[inside[0] : inside[-1] + 1], strict=True)]
    return rows


def write_xsb(path: str | Path, levels: Iterable[Level]) -> None:
    """Write ``levels`` so that :func:`read_xsb` gives the same ones back, each under its number as a comment."""
    blocks = ("\n".join([f"; {number}", *level.rows()]) for number, level in enumerate(levels, start=1))
    Path(path).write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
