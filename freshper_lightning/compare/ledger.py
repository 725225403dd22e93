"""The table of evaluations as the record of what is finished: a run that it holds is not run again anywhere."""

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from freshper_lightning.compare.collect import Row, read_table, rows_of, write_table
from freshper_lightning.compare.run import TrainingJob
from freshper_lightning.compare.settings import MODES
from freshper_lightning.errors import ConfigurationError

Runs = dict[tuple[str, str, int], list[Row]]
"""Rows by task, arm and seed."""


class Ledger:
    """Rows of finished runs. Rows are added, by several comparisons at a time where need be, and never removed.

    Runs that the table came with need no folders: a table from another machine, put where this one's would be, counts.

    Args:
        path: The CSV file; it may not exist yet.
        task: Name of the comparison's task in it.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path, self._task = path, task

    def lacks(self, runs: Sequence[TrainingJob]) -> list[TrainingJob]:
        """Those of the runs that the table does not have.

        Raises:
            ConfigurationError: The table is damaged, or has an arm and seed in part or with another configuration.
        """
        known = self._read()
        return [run for run in runs if not self._has(known, run)]

    def _has(self, known: Runs, run: TrainingJob) -> bool:
        rows = known.get((self._task, run.arm, run.seed))
        if rows is None:
            return False
        if {row.config for row in rows} != {run.marker.digest()}:
            run.marker.check()  # says which key, where the folder is still there
            raise ConfigurationError(
                f"{self.path} holds {run.name} of another configuration than arms.{run.arm} has now; give another"
                " --folder, or remove these rows"
            )
        if missing := _missing(rows, run):
            raise ConfigurationError(f"{self.path} holds {run.name} without {missing}; remove the rest of it")
        return True

    def add(self, runs: Sequence[TrainingJob]) -> None:
        """Write what has been finished since, beside what others have written meanwhile."""
        runs = [run for run in runs if run.succeeded]
        if not runs:
            return
        with self._alone():
            known = self._read()
            new = [run for run in runs if not self._has(known, run)]
            known |= {(self._task, run.arm, run.seed): rows_of(self._task, run) for run in new}
            if new:
                write_table(self.path, [row for key in sorted(known) for row in known[key]])

    def rows(self, runs: Sequence[TrainingJob]) -> list[Row]:
        """Of these runs, as far as they are there."""
        known = self._read()
        return [row for run in runs for row in known.get((self._task, run.arm, run.seed), [])]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> Runs:
        return by_run(read_table(self.path), self.path) if self.path.exists() else {}


def by_run(rows: Iterable[Row], path: Path) -> Runs:
    """The rows of a table, run by run.

    Raises:
        ConfigurationError: An evaluation is there more than once; the message names it.
    """
    found: Runs = {}
    seen = set[tuple[str, str, int, str, int]]()
    for row in rows:
        moment = (row.task, row.arm, row.seed, row.mode, row.update)
        if moment in seen:
            raise ConfigurationError(
                f"{path} has {row.arm}, seed {row.seed}, {row.mode}, update {row.update} of {row.task} more than once"
            )
        seen.add(moment)
        found.setdefault((row.task, row.arm, row.seed), []).append(row)
    return found


def _missing(rows: Sequence[Row], run: TrainingJob) -> str:
    """Which evaluations of a whole run are not there, in words; empty where all are."""
    evaluation, iterations = run.recipe.config["evaluation"], run.recipe.config["trainer"]["max_epochs"]
    every = evaluation["every_n_iterations"]
    expected = {*range(every, iterations + 1, every), *([0] if evaluation["at_start"] else [])}
    for mode in evaluation["modes"] or MODES:
        lost = sorted(expected - {row.iteration for row in rows if row.mode == mode})
        if lost:
            return f"the {mode} evaluation of iteration {lost[0]}"
    return ""
