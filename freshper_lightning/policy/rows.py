"""Where conversations lie: spread over micro-batches, in rows without padding, what several begin with only once."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapreplace

ATTENTION_TOKENS = 1000
"""Width of rows at which attention takes about as long as the rest of the model.

Measured on a CPU: 560 for a hidden size of 128 and 2,100 for one of 576.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Conversations that lie together: once the tokens that all begin with, then what follows them in each."""

    members: tuple[int, ...]
    """Indices of the conversations."""
    opening: int
    """Tokens that all begin with; 0 where one conversation is alone."""
    length: int
    """Tokens of the whole block."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a conversation begins with."""

    content: Hashable
    """Equal where the tokens are."""
    length: int
    """Tokens; fewer than the conversation has."""


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of the conversations in each of exactly ``parts`` groups of about as many tokens, each in order.

    The longest that is left goes to the group with the fewest tokens, the first of equals, so that no group has more
    than 4/3 of the tokens that the best partition's largest has (Graham 1969). Groups stay empty where there are
    fewer conversations than groups.
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, group) for group in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, group = loads[0]
        groups[group].append(index)
        heapreplace(loads, (load + lengths[index], group))
    return [sorted(group) for group in groups]


def pack_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: indices of the conversations in each row of ``width`` tokens.

    Raises:
        ValueError: A conversation is longer than a row.
    """
    if lengths and max(lengths) > width:
        raise ValueError(f"a conversation of {max(lengths)} tokens does not fit in a row of {width}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def cheapest_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the conversations in each row, for rows that take the model the least time.

    With R rows of W tokens that is about R W (1 + W / ATTENTION_TOKENS): narrow rows save attention, which looks at a
    whole row for each token, and wide ones leave less room over. Rows are at least as wide as the longest conversation.
    """
    longest, total = max(lengths), sum(lengths)
    best = pack_rows(lengths, longest)
    least = _cost(len(best), _width(lengths, best))
    for count in range(len(best) - 1, 0, -1):
        width = max(longest, -(-total // count))
        if _cost(count, width) >= least:  # and so it is for fewer rows
            break
        rows = pack_rows(lengths, width)
        cost = _cost(len(rows), _width(lengths, rows))
        if cost < least:
            best, least = rows, cost
    return best


def _cost(rows: int, width: int) -> int:
    return rows * width * (ATTENTION_TOKENS + width)


def _width(lengths: Sequence[int], rows: list[list[int]]) -> int:
    return max(sum(lengths[index] for index in row) for row in rows)


def cheapest_layout(lengths: Sequence[int], openings: Sequence[Opening] | None) -> list[list[Block]]:
    """The blocks in each row, for rows that take the model the least time.

    The more conversations share an opening, the fewer tokens there are, and the wider are the rows, which take no more
    room for it. Without ``openings`` every conversation is a block of its own.
    Source: Prefix Grouper (arXiv:2506.05433), where all members of a group share their prompt.
    """
    families = _families(range(len(lengths)), openings)
    largest = max(map(len, families))
    layouts: list[tuple[int, int, list[list[Block]]]] = []
    most = 1
    while True:
        blocks = [_block(part, lengths, openings) for family in families for part in _even(family, most)]
        sizes = [block.length for block in blocks]
        rows = cheapest_rows(sizes)
        layout = [[blocks[i] for i in row] for row in rows]
        if most == 1 or room(layout) <= room(layouts[0][2]):
            layouts.append((_cost(len(rows), _width(sizes, rows)), most, layout))
        if most >= largest:
            return min(layouts)[2]
        most *= 2


def room(layout: Sequence[Sequence[Block]]) -> int:
    """Tokens of all rows, left-over room included."""
    return len(layout) * max(sum(block.length for block in row) for row in layout)


def micro_batches_of(lengths: Sequence[int], parts: int, openings: Sequence[Opening] | None) -> list[list[int]]:
    """Indices of the conversations in each of exactly ``parts`` micro-batches of about as many tokens, each in order.

    Those with the same opening stay together where that makes the largest micro-batch no larger.
    """
    apart = balanced_parts(lengths, parts)
    if openings is None or parts == 1:
        return apart
    families = _families(range(len(lengths)), openings)
    sizes = [_block(family, lengths, openings).length for family in families]
    together = [sorted(i for f in part for i in families[f]) for part in balanced_parts(sizes, parts)]

    def largest(split: list[list[int]]) -> int:
        filled = [part for part in split if part]
        layouts = (cheapest_layout([lengths[i] for i in part], [openings[i] for i in part]) for part in filled)
        return max(map(room, layouts), default=0)

    return together if largest(together) <= largest(apart) else apart


def _families(indices: Sequence[int], openings: Sequence[Opening] | None) -> list[list[int]]:
    """Conversations with the same opening; each alone where there are no openings."""
    families: dict[Hashable, list[int]] = {}
    for index in indices:
        families.setdefault(index if openings is None else openings[index].content, []).append(index)
    return list(families.values())


def _even(family: Sequence[int], most: int) -> list[Sequence[int]]:
    """The family in as few parts of at most ``most`` as can be, which differ by one member at most."""
    parts = -(-len(family) // most)
    bounds = [len(family) * i // parts for i in range(parts + 1)]
    return [family[bounds[i] : bounds[i + 1]] for i in range(parts)]


def _block(members: Sequence[int], lengths: Sequence[int], openings: Sequence[Opening] | None) -> Block:
    total = sum(lengths[index] for index in members)
    if openings is None or len(members) == 1:
        return Block(tuple(members), 0, total)
    opening = openings[members[0]].length
    return Block(tuple(members), opening, total - opening * (len(members) - 1))
