"""What the buffer is meant to reach, and whether it does."""

from collections.abc import Sequence

from benchmarks.pages import Target
from benchmarks.replay.buffers import CPPRB, EXPONENTIAL, INVERSE, NO_DECAY, OURS, PUBLISHED, TORCHRL
from benchmarks.replay.measure import ADD, DECAY_DRAW, DRAW, FILLING, SAVE, UPDATE
from benchmarks.replay.table import MemoryRow, Results

FACTORISING = (EXPONENTIAL, NO_DECAY)


def targets(results: Results, memory: Sequence[MemoryRow]) -> list[Target]:
    """All of them, in the order in which they are reported."""
    return [
        _at_most(results, "draw 128 of 50,000, factorising decay, at most 0.2 ms", FACTORISING, [50_000], [DRAW], 0.2),
        _at_most(results, "draw 128 of 1,000,000, factorising decay, at most 1 ms", FACTORISING, [10**6], [DRAW], 1),
        _at_most(results, "draw 128 of 1,000,000, inverse decay, at most 20 ms", [INVERSE], [10**6], [DRAW], 20),
        _at_most(results, "add 128, full or not, at any size, at most 2 ms", OURS, results.sizes(), [FILLING, ADD], 2),
        _at_most(results, "save 50,000 of 512 tokens, to disk, at most 2 s", [EXPONENTIAL], [50_000], [SAVE], 2000),
        *[
            _ratio(results, f"{size:,}: draw + update without decay, at most 2 x cpprb", CPPRB, NO_DECAY, size, 2)
            for size in results.sizes()
        ],
        *[
            _ratio(results, f"{size:,}: draw + update without decay, ahead of torchrl", TORCHRL, NO_DECAY, size, 1)
            for size in results.sizes()
        ],
        *[
            _ratio(results, f"{size:,}: decay and draw, ahead of {peer}", peer, EXPONENTIAL, size, 1)
            for peer in (TORCHRL, CPPRB)
            for size in results.sizes()
        ],
        _times_faster(results),
        *[_bytes(row) for row in memory if row.tokens == 512 and row.log_prob_dtype == "float32"],
    ]


def _at_most(
    results: Results, text: str, buffers: Sequence[str], sizes: Sequence[int], operations: Sequence[str], bound: float
) -> Target:
    """The worst of all combinations."""
    found = [
        results.median(size, buffer, operation) for size in sizes for buffer in buffers for operation in operations
    ]
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return Target(text, "", None)
    return Target(text, f"{max(known):.3g} ms", max(known) <= bound)


def _ratio(results: Results, text: str, peer: str, ours: str, size: int, bound: float) -> Target:
    operations = (DRAW, UPDATE) if ours == NO_DECAY else (DECAY_DRAW,)
    own, theirs = results.median(size, ours, *operations), results.median(size, peer, *operations)
    if own is None or theirs is None:
        return Target(text, "", None)
    return Target(text, f"{own:.3g} ms against {theirs:.3g} ms: {own / theirs:.2g} x", own <= bound * theirs)


def _times_faster(results: Results) -> Target:
    text = "50,000: draw 1000 times faster than the published loops"
    own, theirs = (results.median(50_000, buffer, DRAW) for buffer in (EXPONENTIAL, PUBLISHED))
    if own is None or theirs is None:
        return Target(text, "", None)
    return Target(text, f"{own:.3g} ms against {theirs:.3g} ms: {theirs / own:,.0f} times", theirs >= 1000 * own)


def _bytes(row: MemoryRow) -> Target:
    text = f"bytes per token at 512 tokens and {row.turns} turns, {row.sampled:.0%} sampled, at most 10"
    return Target(text, f"{row.held:.2f} held, {row.stored:.2f} stored", row.held <= 10)
