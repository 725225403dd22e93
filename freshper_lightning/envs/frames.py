"""RGB frames of games on a grid: every cell is a ground with figures on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TILE = 16
"""Height and width of a cell, in pixels."""

Color: TypeAlias = tuple[int, int, int]
"""Red, green and blue, each from 0 to 255."""

Frame: TypeAlias = NDArray[np.uint8]
"""Height x width x 3."""

WHITE, BLACK, GRAY, BLUE = (238, 238, 238), (32, 32, 32), (96, 96, 96), (40, 90, 200)
GREEN, RED, BROWN, ICE = (60, 160, 80), (200, 60, 50), (160, 110, 60), (200, 225, 240)


@dataclass(frozen=True, slots=True)
class Figure:
    """A disc or a square in the middle of a cell; ``width`` is a share of the cell's."""

    color: Color
    width: float
    round: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """How a cell looks: a ground, and figures of which later ones cover earlier ones."""

    ground: Color
    figures: tuple[Figure, ...] = ()


@cache
def draw_cell(picture: Picture) -> Frame:
    """``TILE`` x ``TILE`` x 3; the last row and column are darker, so that cells can be told apart."""
    cell = np.full((TILE, TILE, 3), picture.ground, dtype=np.uint8)
    offsets = np.abs(np.arange(TILE) - (TILE - 1) / 2) * 2 / TILE
    vertical, horizontal = np.meshgrid(offsets, offsets, indexing="ij")
    for figure in picture.figures:
        extent = np.hypot(vertical, horizontal) if figure.round else np.maximum(vertical, horizontal)
        cell[extent <= figure.width] = figure.color
    cell[-1], cell[:, -1] = cell[-1] // 4 * 3, cell[:, -1] // 4 * 3
    return cell


def draw_frame(rows: Sequence[str], pictures: Mapping[str, Picture]) -> Frame:
    """The frame of a map that is given as one symbol per cell, each with its picture."""
    return np.concatenate([np.concatenate([draw_cell(pictures[symbol]) for symbol in row], axis=1) for row in rows])
