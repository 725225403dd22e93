"""The table of a study, one number with its interval in each row; what is there is never measured again."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.study.bootstrap import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity at one age."""

    task: str
    seed: int
    variant: str
    """What the run has changed of the arm that is studied; empty for the arm itself."""
    age: int
    """Applied updates between the policy that sampled the probe and the one that was measured."""
    loss: str
    """Name in :data:`freshper_lightning.study.menu.MENU`; empty for what does not depend on a loss."""
    quantity: str
    value: float
    low: float
    high: float
    code: str = ""
    """Commit that it was measured with."""


@dataclass(frozen=True, slots=True)
class Key:
    """What is measured in one go."""

    task: str
    seed: int
    age: int
    variant: str = ""

    def rows(self, estimates: Mapping[str, Estimate], loss: str = "") -> list[Row]:
        """Rows of estimates by quantity."""
        return [
            Row(self.task, self.seed, self.variant, self.age, loss, quantity, found.value, found.low, found.high)
            for quantity, found in estimates.items()
        ]


def read(path: str | Path) -> list[Row]:
    """All rows of a file; none where there is no file.

    Raises:
        ConfigurationError: It has other columns, such as those of an earlier version.
    """
    if not Path(path).exists():
        return []
    columns = [field.name for field in fields(Row)]
    with Path(path).open(newline="") as file:
        lines = csv.DictReader(file)
        if list(lines.fieldnames or ()) != columns:
            raise ConfigurationError(f"{path} must have the columns {', '.join(columns)}; give another --folder")
        return [
            Row(
                task=row["task"],
                seed=int(row["seed"]),
                variant=row["variant"],
                age=int(row["age"]),
                loss=row["loss"],
                quantity=row["quantity"],
                value=float(row["value"]),
                low=float(row["low"]),
                high=float(row["high"]),
                code=row["code"],
            )
            for row in lines
        ]


def write(path: str | Path, rows: Sequence[Row]) -> None:
    """Replace the file as a whole, with rows in the order of task, seed, variant and age; six digits of each number."""
    ordered = sorted(rows, key=lambda row: (row.task, row.seed, row.variant, row.age))
    temporary = Path(path).with_suffix(".tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in ordered:
            writer.writerow(asdict(row) | {name: f"{getattr(row, name):.6g}" for name in ("value", "low", "high")})
    temporary.replace(path)


def has(rows: Sequence[Row], key: Key) -> bool:
    """Whether the key has been measured."""
    return any(Key(row.task, row.seed, row.age, row.variant) == key for row in rows)
