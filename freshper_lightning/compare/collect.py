"""One tidy table of evaluations, from the logs of finished runs."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from freshper_lightning import csv_table
from freshper_lightning.callbacks.evaluation import ITERATION, STEPS
from freshper_lightning.compare.run import TrainingJob
from freshper_lightning.compare.settings import MODES
from freshper_lightning.compare.stack import LEARNING_RATE, flat
from freshper_lightning.errors import require_setting


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
    episodes: int
    """How many were asked for; those whose environment failed are in no mean."""
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
    found, seconds = evaluations(job.folder), training_seconds(job.folder)
    digest, made_with = job.marker.digest(), job.marker.code()
    settings = flat(job.recipe.config)
    rate, episodes = settings.get(LEARNING_RATE), int(settings["evaluation.episodes"])
    rows = []
    for mode in MODES:
        for iteration, (update, values) in sorted(found.items()):
            score = values.get(f"evaluation/{mode}/return")
            if score is not None:
                moment = (update, iteration, int(values[STEPS]), round(seconds[update], 2))
                result = (mode, values.get(f"evaluation/{mode}/success"), score, episodes)
                rows.append(Row(task, job.arm, job.seed, *moment, *result, digest, made_with, rate))
    return rows


def evaluations(folder: Path) -> dict[int, tuple[int, dict[str, float]]]:
    """Applied updates and logged values of each evaluation, by iteration; the newest where one was repeated.

    Logs are by update, of which iterations that skip all of theirs have none: two evaluations may be of one update.
    """
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=_begun):
        values: dict[str, float] = {}
        for _, update, tag, value in _moments(path):
            if not tag.startswith("evaluation/"):
                continue
            values[tag] = value
            if tag == ITERATION:  # the last of those that are logged together
                found[int(value)] = (update, values)
                values = {}
    return found


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
        for wall, update, tag, _ in moments:
            clock += 0.0 if tag.startswith("evaluation/") else wall - before
            before = wall
            if update not in at_update or tag.startswith("update/"):
                at_update[update] = clock
    return at_update


def _begun(path: Path) -> float:
    return min((wall for wall, *_ in _moments(path)), default=math.inf)


def _moments(path: Path) -> list[tuple[float, int, str, float]]:
    """Wall-clock time, update, tag and value of every scalar of one file, in the order that they were written in."""
    return [
        (event.wall_time, event.step, value.tag, value.simple_value)
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.HasField("simple_value") and value.tag != "epoch"
    ]


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Replaces the file at once."""
    csv_table.write_table(path, COLUMNS, map(astuple, rows))


def read_table(path: str | Path) -> list[Row]:
    """What :func:`write_table` wrote.

    Raises:
        ConfigurationError: There is no such file, it has other columns, or a line is no evaluation.
    """
    return [_parsed(line) for line in csv_table.read_table(path, COLUMNS)]


def _parsed(line: csv_table.Line) -> Row:
    values = line.values
    row = Row(
        task=values["task"],
        arm=values["arm"],
        seed=line.number("seed", int),
        update=line.number("update", int),
        iteration=line.number("iteration", int),
        environment_steps=line.number("environment_steps", int),
        seconds=line.number("seconds", float),
        mode=values["mode"],
        success=line.number("success", float) if values["success"] else None,
        score=line.number("return", float),
        episodes=line.number("episodes", int),
        config=values["config"],
        code=values["code"],
        learning_rate=line.number("learning_rate", float) if values["learning_rate"] else None,
    )
    for column in ("seed", "update", "iteration", "environment_steps", "seconds"):
        found = getattr(row, column)
        require_setting(f"{line.place}: {column}", found, 0 <= found < math.inf, "a number of at least 0")
    require_setting(f"{line.place}: return", row.score, math.isfinite(row.score), "a finite number")
    require_setting(f"{line.place}: mode", row.mode, row.mode in MODES, " or ".join(MODES))
    rate = row.learning_rate
    require_setting(
        f"{line.place}: learning_rate", rate, rate is None or 0 <= rate < math.inf, "a number of at least 0"
    )
    require_setting(f"{line.place}: episodes", row.episodes, row.episodes >= 1, "at least 1")
    share = row.success is None or 0 <= row.success <= 1
    require_setting(f"{line.place}: success", row.success, share, "from 0 to 1, or empty")
    return row
