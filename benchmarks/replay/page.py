"""Tables in Markdown, and the page that they stand in."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import put_between, significant, table
from benchmarks.replay.buffers import BUFFERS
from benchmarks.replay.measure import BYTES, OPERATIONS
from benchmarks.replay.table import MemoryRow, Results, Row

BEGIN, END = "<!-- {name}: written by `make bench-replay` -->", "<!-- end of {name} -->"


def put_into(page: Path, sections: dict[str, str]) -> None:
    """Replaces what stands between the marks of each section; see :func:`benchmarks.pages.put_between`."""
    put_between(page, sections, BEGIN, END)


def speed_table(results: Results) -> str:
    """Medians in milliseconds: one line for each size and buffer."""
    columns = ["N", "tokens", "buffer", *OPERATIONS, "bytes/token"]
    lines = [_speed_line(results, size, buffer) for size in results.sizes() for buffer in BUFFERS]
    return table(columns, (line for line in lines if line))


def _speed_line(results: Results, size: int, buffer: str) -> list[str]:
    bytes_row = results.find(size, buffer, BYTES)
    if bytes_row is None or bytes_row.median is None:
        return []
    times = [_time(results.find(size, buffer, operation)) for operation in OPERATIONS]
    return [f"{size:,}", str(bytes_row.tokens), buffer, *times, f"{bytes_row.median / bytes_row.tokens:.1f}"]


def _time(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"over {row.limit_s:g} s" if row.median is None else significant(row.median)


def memory_table(rows: Sequence[MemoryRow]) -> str:
    """One line for each length."""
    lines = (
        [
            str(row.tokens),
            str(row.turns),
            f"{row.sampled:.0%}",
            row.log_prob_dtype,
            f"{row.trajectories:,}",
            f"{row.stored:.2f}",
            f"{row.held:.2f}",
        ]
        for row in rows
    )
    return table(["tokens", "turns", "sampled", "log-probs", "trajectories", "stored", "held"], lines)


def machine_line(results: Results) -> str:
    """Where the numbers come from."""
    return "\n".join(sorted({f"Measured at commit {row.commit} on {row.machine}." for row in results.rows}))
