"""Bytes per token of this project's buffer."""

from benchmarks.replay.ours import Ours
from benchmarks.replay.payload import BATCH, Payload, make_batches
from benchmarks.replay.table import MemoryRow
from freshper_lightning.replay import NoDecay
from freshper_lightning.replay.codec import LogProbDtype

LENGTHS = (64, 512, 4096)
ALL_TOKENS = 8_000_000
"""Tokens in a buffer, about."""


def measure_memory(all_tokens: int = ALL_TOKENS) -> list[MemoryRow]:
    """Every length, with half of the tokens and with all of them sampled, in both precisions of log-probabilities."""
    dtypes: tuple[LogProbDtype, ...] = ("float32", "float16")
    return [
        _row(Payload(tokens, sampled=sampled), dtype, all_tokens)
        for tokens in LENGTHS
        for sampled in (0.5, 1.0)
        for dtype in dtypes
    ]


def _row(payload: Payload, dtype: LogProbDtype, all_tokens: int) -> MemoryRow:
    adds = max(all_tokens // payload.tokens // BATCH, 1)
    contender = Ours(adds * BATCH, make_batches(payload, 1), NoDecay(), dtype)
    contender.fill(adds)
    buffer, tokens = contender.buffer, adds * BATCH * payload.tokens
    stored, held = buffer.nbytes - buffer.image_nbytes, buffer.allocated - buffer.image_nbytes
    return MemoryRow(
        payload.tokens, payload.turns, payload.sampled, dtype, adds * BATCH, stored / tokens, held / tokens
    )
