"""Speed and memory of the replay buffer, beside torchrl, cpprb and the published loops.

`python -m benchmarks.replay` measures the sizes and buffers that its table lacks, keeps the others, writes the tables
into the page and says which targets are met. It can be stopped and started. `make bench-replay` runs it in an
environment that has everything.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.machine import machine, same_commit
from benchmarks.pages import target_table
from benchmarks.replay import page, table
from benchmarks.replay.buffers import BUFFERS, maker
from benchmarks.replay.measure import BYTES, OPERATIONS, measure
from benchmarks.replay.memory import ALL_TOKENS, measure_memory
from benchmarks.replay.payload import Payload, make_batches
from benchmarks.replay.stopwatch import Effort, Stopwatch, quartiles
from benchmarks.replay.table import MemoryRow, Results, Row
from benchmarks.replay.targets import targets
from benchmarks.rows import require_own_table

SIZES = (1_000, 10_000, 50_000, 200_000, 1_000_000)
LONG, SHORT = Payload(512), Payload(128)
LARGEST_OF_LONG = 200_000
"""A larger buffer gets short trajectories, so that every buffer, and a copy of it, fits in 15 GB."""
DIFFERENT_BATCHES = 8
PACKAGES = ("numpy", "torch", "torchrl", "cpprb")
"""Whose versions are noted."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and report everything."""
    options = _options(arguments)
    torch.set_num_threads(1)
    rows = table.read(options.table, Row)
    for size in options.sizes:
        for name in options.buffers:
            if not Results(rows).has(size, name):
                print(f"{size:,} {name}", flush=True)
                rows += _measured(size, name, options)
                table.write(options.table, rows)
    memory = table.read(options.memory, MemoryRow) or measure_memory(options.memory_tokens)
    table.write(options.memory, memory)
    _report(Results(rows), memory, options.page)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="trajectories in the buffer")
    parser.add_argument("--buffers", nargs="+", choices=BUFFERS, default=BUFFERS)
    parser.add_argument("--table", type=Path, default=Path("docs/results/replay.csv"))
    parser.add_argument("--memory", type=Path, default=Path("docs/results/replay_memory.csv"))
    parser.add_argument("--page", type=Path, default=Path("docs/replay.md"), help="where the tables are put")
    parser.add_argument("--repetitions", type=int, default=Effort.repetitions, help="of each operation, at most")
    parser.add_argument("--budget", type=float, default=Effort.budget, help="seconds for the repetitions")
    parser.add_argument("--limit", type=float, default=Effort.limit, help="seconds that one repetition may take")
    parser.add_argument("--memory-tokens", type=int, default=ALL_TOKENS, help="tokens in a buffer that is weighed")
    options = parser.parse_args(arguments)
    require_own_table(options, parser, "repetitions", "budget", "limit", "memory_tokens")
    return options


def _measured(size: int, name: str, options: argparse.Namespace) -> list[Row]:
    payload = LONG if size <= LARGEST_OF_LONG else SHORT
    effort = Effort(repetitions=options.repetitions, budget=options.budget, limit=options.limit)
    with same_commit() as measured:
        watch, size_of_one = measure(maker(name, size), size, make_batches(payload, DIFFERENT_BATCHES), effort)
    where = measured(), machine(*PACKAGES)
    about = Row(size, payload.tokens, name, BYTES, size_of_one, None, None, None, 1, effort.limit, *where)
    return [*(_row(watch, operation, about) for operation in OPERATIONS if watch.knows(operation)), about]


def _row(watch: Stopwatch, operation: str, about: Row) -> Row:
    times = [1e3 * spent for spent in watch.seconds.get(operation, [])]
    median, lower, upper = quartiles(times) if times else (None, None, None)
    return replace(
        about,
        operation=operation,
        median=median,
        lower_quartile=lower,
        upper_quartile=upper,
        least=min(times, default=None),
        repetitions=len(times),
    )


def _report(results: Results, memory: list[MemoryRow], where: Path) -> None:
    found = targets(results, memory)
    sections = {
        "speed": f"{page.speed_table(results)}\n\n{page.machine_line(results)}",
        "targets": target_table(found),
        "memory": page.memory_table(memory),
    }
    page.put_into(where, sections)
    print("\n\n".join(sections.values()))


if __name__ == "__main__":
    main()
