"""The table of evaluations as the record of what is finished: a run that it holds is not run again anywhere."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from freshper_lightning.compare.collect import Row, read_table, rows_of, write_table
from freshper_lightning.compare.run import TrainingJob
from freshper_lightning.compare.settings import MODES
from freshper_lightning.errors import ConfigurationError, require_setting
from freshper_lightning.exclusive import exclusive

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
        if missing := missing_evaluation(rows, run):
            raise ConfigurationError(f"{self.path} holds {run.name} without {missing}; remove the rest of it")
        return True

    def add(self, runs: Sequence[TrainingJob]) -> dict[str, str]:
        """Write what has been finished since, beside what others have written meanwhile.

        Returns the finished runs whose logs lack an evaluation, such as those that ended early, and which one; nothing
        of these is written.
        """
        runs = [run for run in runs if run.succeeded]
        if not runs:
            return {}
        with exclusive(self.path):
            known = self._read()
            new = {run.name: (run, rows_of(self._task, run)) for run in runs if not self._has(known, run)}
            lacking = {name: missing for name, (run, rows) in new.items() if (missing := missing_evaluation(rows, run))}
            whole = [(run, rows) for name, (run, rows) in new.items() if name not in lacking]
            known |= {(self._task, run.arm, run.seed): rows for run, rows in whole}
            if whole:
                write_table(self.path, [row for key in sorted(known) for row in known[key]])
        return {name: without(missing) for name, missing in lacking.items()}

    def rows(self, runs: Sequence[TrainingJob]) -> list[Row]:
        """Of these runs, as far as they are there."""
        known = self._read()
        return [row for run in runs for row in known.get((self._task, run.arm, run.seed), [])]

    def _read(self) -> Runs:
        return by_run(read_table(self.path), self.path) if self.path.exists() else {}


def by_run(rows: Iterable[Row], path: Path) -> Runs:
    """The rows of a table, run by run.

    Raises:
        ConfigurationError: An evaluation is there more than once, or a run has several configurations; the message
            names it.
    """
    found: Runs = {}
    seen = set[tuple[str, str, int, str, int]]()
    for row in rows:
        name = f"{row.arm}, seed {row.seed} of {row.task}"
        moment = (row.task, row.arm, row.seed, row.mode, row.iteration)
        if moment in seen:
            raise ConfigurationError(
                f"{path} has the {row.mode} evaluation of iteration {row.iteration} of {name} twice"
            )
        seen.add(moment)
        run = found.setdefault((row.task, row.arm, row.seed), [])
        if run and run[0].config != row.config:
            raise ConfigurationError(f"{path} has {name} with configurations {run[0].config} and {row.config}")
        run.append(row)
    return found


def require_whole(runs: Runs, path: Path, window: int) -> None:
    """Does nothing where all these runs have been evaluated at the same iterations, in the same modes.

    Raises:
        ConfigurationError: A run lacks an evaluation that others have, or has fewer after its start than the ``window``
            whose mean is its result; the message names it.
    """
    moments = {run: {(row.mode, row.iteration) for row in rows} for run, rows in runs.items()}
    expected = set[tuple[str, int]]().union(*moments.values())
    for (task, arm, seed), own in moments.items():
        if lost := sorted(expected - own, key=lambda moment: moment[::-1]):
            mode, iteration = lost[0]
            raise ConfigurationError(
                f"{path} has {arm}, seed {seed} of {task} without the {mode} evaluation of iteration {iteration}, which"
                " other runs have; remove the rest of it"
            )
        trained = len({iteration for _, iteration in own if iteration > 0})
        where = f"the evaluations of {arm}, seed {seed} of {task} in {path}"
        require_setting("final_window", window, window <= trained, f"at most {where}: {trained}")


def without(missing: str) -> str:
    """Why a finished run does not count."""
    return f"its logs are without {missing}"


def missing_evaluation(rows: Sequence[Row], run: TrainingJob) -> str:
    """Which evaluation of a whole run is not there, in words; empty where all are."""
    evaluation, iterations = run.recipe.config["evaluation"], run.recipe.config["trainer"]["max_epochs"]
    every = evaluation["every_n_iterations"]
    expected = {*range(every, iterations + 1, every), *([0] if evaluation["at_start"] else [])}
    for mode in evaluation["modes"] or MODES:
        lost = sorted(expected - {row.iteration for row in rows if row.mode == mode})
        if lost:
            return f"the {mode} evaluation of iteration {lost[0]}"
    return ""
