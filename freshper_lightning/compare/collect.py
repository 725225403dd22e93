"""One tidy table of evaluations, from the logs of finished runs."""

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TypeVar

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from freshper_lightning.callbacks.evaluation import ITERATION, STEPS
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.compare.run import TrainingJob
from freshper_lightning.compare.settings import MODES
from freshper_lightning.compare.stack import LEARNING_RATE, flat
from freshper_lightning.errors import ConfigurationError, require_setting

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Row:
    """The held-out episodes of one moment of one run, played in one mode."""

    task: str
    arm: str
    seed: int
    update: int
    """Applied optimizer updates so far, replay updates included."""
    iteration: int
    environment_steps: int
    """Steps of training episodes so far."""
    seconds: float
    """Wall-clock time of training so far, without evaluations and interruptions."""
    mode: str
    success: float | None
    """Share of the episodes; None where the environment gives no verdict."""
    score: float
    """Mean return; the column is named ``return``."""
    config: str
    """Digest of the run's whole configuration: its settings, seed and start, which counts by its path where it is a
    folder."""
    code: str
    """Commit that the run was made with; ``A to B`` where it was begun with one and finished with another."""
    learning_rate: float | None
    """The optimizer's; None where the configuration does not say it."""


COLUMNS = tuple("return" if f.name == "score" else f.name for f in fields(Row))


def rows_of(task: str, job: TrainingJob) -> list[Row]:
    """The evaluations of a run in order of time, mode by mode."""
    scalars, seconds = read_scalars(job.folder), training_seconds(job.folder)
    digest, made_with = job.marker.digest(), job.marker.code()
    environment_steps, iterations = dict(scalars[STEPS]), dict(scalars[ITERATION])
    rate = flat(job.recipe.config).get(LEARNING_RATE)
    rows = []
    for mode in MODES:
        success = dict(scalars.get(f"evaluation/{mode}/success", []))
        for update, score in scalars.get(f"evaluation/{mode}/return", []):
            steps = environment_steps[update]
            moment = (update, int(iterations[update]), int(steps), round(seconds[update], 2))
            share = success.get(update)
            rounded = None if share is None else round(share, 6)
            rows.append(Row(task, job.arm, job.seed, *moment, mode, rounded, round(score, 6), digest, made_with, rate))
    return rows


def training_seconds(folder: Path) -> dict[int, float]:
    """Wall-clock seconds of training at each evaluation, by update.

    Each file of events is one attempt. An attempt goes on with the time that the one before had at the update that it
    resumed from. Time between an event and the evaluation that follows it is not training, and what follows an update,
    such as the next rollout, is no part of the time up to it.
    """
    at_update: dict[int, float] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=_begun):
        moments = _moments(path)
        if not moments:
            continue
        resumed = moments[0][1]
        clock = max((known for update, known in at_update.items() if update <= resumed), default=0.0)
        at_update = {update: known for update, known in at_update.items() if update <= resumed}
        before = moments[0][0]
        for wall, update, tag in moments:
            clock += 0.0 if tag.startswith("evaluation/") else wall - before
            before = wall
            if update not in at_update or tag.startswith("update/"):
                at_update[update] = clock
    return at_update


def _begun(path: Path) -> float:
    return min((wall for wall, _, _ in _moments(path)), default=math.inf)


def _moments(path: Path) -> list[tuple[float, int, str]]:
    """Wall-clock time, update and tag of every scalar of one file, in order of time."""
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    found = [
        (event.wall_time, event.step, tag)
        for tag in events.Tags()["scalars"]
        if tag != "epoch"
        for event in events.Scalars(tag)
    ]
    return sorted(found)


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Replaces the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in rows)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_table(path: str | Path) -> list[Row]:
    """What :func:`write_table` wrote.

    Raises:
        ConfigurationError: There is no such file, it has other columns, or a line is no evaluation.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} is not a file")
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ConfigurationError(f"{path} must have the columns {', '.join(COLUMNS)}, and no others")
        return [_parsed(line, f"{path}, line {reader.line_num}") for line in reader]


def _parsed(line: dict[str, str], place: str) -> Row:
    if None in line or None in line.values():
        raise ConfigurationError(f"{place} must have {len(COLUMNS)} values")

    def number(column: str, kind: type[Number]) -> Number:
        try:
            return kind(line[column])
        except ValueError as error:
            raise ConfigurationError(f"{place}: {column}={line[column]} must be a number") from error

    row = Row(
        task=line["task"],
        arm=line["arm"],
        seed=number("seed", int),
        update=number("update", int),
        iteration=number("iteration", int),
        environment_steps=number("environment_steps", int),
        seconds=number("seconds", float),
        mode=line["mode"],
        success=number("success", float) if line["success"] else None,
        score=number("return", float),
        config=line["config"],
        code=line["code"],
        learning_rate=number("learning_rate", float) if line["learning_rate"] else None,
    )
    require_setting(f"{place}: mode", row.mode, row.mode in MODES, " or ".join(MODES))
    require_setting(
        f"{place}: success", row.success, row.success is None or 0 <= row.success <= 1, "from 0 to 1, or empty"
    )
    return row
