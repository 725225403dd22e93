"""What is done with a buffer, and in which order."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.replay.contender import Contender, Saving
from benchmarks.replay.payload import BATCH, Batch
from benchmarks.replay.stopwatch import Effort, Stopwatch

Make = Callable[[int, Sequence[Batch]], Contender]

FILLING, ADD, UPDATE, DRAW, READ, DECAY, DECAY_DRAW, SAVE, LOAD = OPERATIONS = (
    "add, not full",
    "add, full",
    "update",
    "draw",
    "draw and read",
    "decay",
    "decay and draw",
    "save",
    "load",
)
BYTES = "bytes"
SCRATCH = Path("runs/bench_replay")
"""For buffers that are saved and loaded: on the disk that runs are on."""
_ADDS_BEFORE_FULL = 20


def measure(make: Make, size: int, batches: Sequence[Batch], effort: Effort) -> tuple[Stopwatch, float]:
    """Times of all operations on a buffer of ``size`` trajectories, and its bytes per trajectory."""
    watch = Stopwatch(effort)
    contender = _fill(make, size, batches, watch)
    contender.add()  # the remainder of a batch
    stored = contender.keys()
    random = np.random.default_rng(0)
    watch.rounds(lambda: _round(contender, watch, random))
    if isinstance(contender, Saving):
        few = Stopwatch(replace(effort, warm_up=1, repetitions=min(effort.repetitions, 7)))
        SCRATCH.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
            few.rounds(lambda: _save_and_load(contender, few, Path(folder)))
        watch.seconds |= few.seconds
        watch.over |= few.over
    return watch, contender.nbytes() / len(stored)


def _fill(make: Make, size: int, batches: Sequence[Batch], watch: Stopwatch) -> Contender:
    """A buffer that is full but for part of a batch; the last additions are timed, in several buffers if need be."""
    adds = max(1, min(_ADDS_BEFORE_FULL, size // BATCH // 2))
    for _ in range(-(-_ADDS_BEFORE_FULL // adds)):
        contender = make(size, batches)
        contender.fill(size // BATCH - adds)
        watch.counting = True
        for _ in range(adds):
            watch.time(FILLING, contender.add)
        watch.counting = False
    return contender


def _round(contender: Contender, watch: Stopwatch, random: np.random.Generator) -> None:
    """Every draw comes right after an addition and an update, so that nothing of it has been done before."""
    watch.time(ADD, contender.add)
    keys, priorities = random.choice(contender.keys(), BATCH), random.random(BATCH) + 1e-3
    watch.time(UPDATE, lambda: contender.update(keys, priorities))
    watch.time(DRAW, contender.draw)
    contender.update(keys, priorities[::-1].copy())
    watch.time(READ, contender.draw_and_read)
    if contender.decays:
        watch.time(DECAY, contender.decay)
        watch.time(DECAY_DRAW, contender.decay_and_draw)


def _save_and_load(contender: Saving, watch: Stopwatch, folder: Path) -> None:
    path = Path(tempfile.mkdtemp(dir=folder)) / "buffer"
    watch.time(SAVE, lambda: contender.save(path))
    if SAVE not in watch.over:
        watch.time(LOAD, lambda: contender.load(path))
