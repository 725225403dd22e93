"""What the tests of games on a grid share."""

import re

TASKS = {
    "frozen_lake": ("freshper/FrozenLake-v0", {}),
    "slippery": ("freshper/FrozenLake-v0", {"slippery": True}),
    "sokoban_simple": ("freshper/Sokoban-v0", {}),
    "sokoban_hard": (
        "freshper/Sokoban-v0",
        {"rows": 10, "columns": 10, "boxes": 2, "min_moves": 15, "max_turns": 50},
    ),
    "cliff_walking": ("freshper/CliffWalking-v0", {}),
}


def answer(action):
    return f"<answer>{action}</answer>"


def board(observation):
    """Rows of cells of a user message, whatever else it says."""
    return [line.split(" ") for line in observation.splitlines() if re.fullmatch(r"\S( \S)+", line)]


def solve(level):
    """Fewest moves that solve a level, by breadth-first play from its symbols alone, or nothing.

    Written apart from the product: its own rules, forwards instead of backwards.
    """
    cells = {(r, c): s for r, row in enumerate(level.rows()) for c, s in enumerate(row)}
    floor = {cell for cell, symbol in cells.items() if symbol != "#"}
    targets = {cell for cell, symbol in cells.items() if symbol in ".*+"}
    player = next(cell for cell, symbol in cells.items() if symbol in "@+")
    frontier = {(player, frozenset(cell for cell, symbol in cells.items() if symbol in "$*"))}
    seen, moves = set(frontier), 0
    while frontier:
        if any(boxes == targets for _, boxes in frontier):
            return moves
        following = {
            (ahead, boxes ^ {ahead, behind} if ahead in boxes else boxes)
            for (row, column), boxes in frontier
            for ahead, behind in (
                ((row + down, column + right), (row + 2 * down, column + 2 * right))
                for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0))
            )
            if ahead in floor and not (ahead in boxes and (behind in boxes or behind not in floor))
        }
        frontier, moves = following - seen, moves + 1
        seen |= frontier
    return None
