"""The table of evaluations as the record of what is finished: a run that it holds is not run again anywhere."""

from collections.abc import Sequence
from pathlib import Path

from freshper_lightning.compare.collect import Row, read_table, rows_of, write_table
from freshper_lightning.compare.run import TrainingJob
from freshper_lightning.errors import ConfigurationError


class Ledger:
    """Rows of finished runs, by task, arm and seed. Rows are added, and never lost.

    Runs that the table came with need no folders: a table from another machine, put where this one's would be, counts.

    Args:
        path: The CSV file; it may not exist yet.
        task: Name of the comparison's task in it.

    Raises:
        ConfigurationError: The file has other columns.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path, self._task = path, task
        self._rows: dict[tuple[str, str, int], list[Row]] = {}
        for row in read_table(path) if path.exists() else []:
            self._rows.setdefault((row.task, row.arm, row.seed), []).append(row)

    def has(self, run: TrainingJob) -> bool:
        """Whether the table has the run.

        Raises:
            ConfigurationError: It has the arm and seed, and with another configuration.
        """
        rows = self._rows.get((self._task, run.arm, run.seed))
        if rows is None:
            return False
        if {row.config for row in rows} != {run.marker.digest()}:
            run.marker.check()  # says which key, where the folder is still there
            raise ConfigurationError(
                f"{self.path} holds {run.name} of another configuration than arms.{run.arm} has now; give another"
                " --folder, or remove these rows"
            )
        return True

    def add(self, runs: Sequence[TrainingJob]) -> None:
        """Write what has been finished since."""
        new = [run for run in runs if run.finished and not self.has(run)]
        for run in new:
            self._rows[(self._task, run.arm, run.seed)] = rows_of(self._task, run)
        if new:
            write_table(self.path, [row for key in sorted(self._rows) for row in self._rows[key]])

    def rows(self, runs: Sequence[TrainingJob]) -> list[Row]:
        """Of these runs, as far as they are there."""
        return [row for run in runs for row in self._rows.get((self._task, run.arm, run.seed), [])]
