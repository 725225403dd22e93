"""The table of a study, one number with its interval in each row; what is there is never measured again."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from freshper_lightning import csv_table
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


COLUMNS = tuple(field.name for field in fields(Row))


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
        ConfigurationError: It has other columns, such as those of an earlier version, or is damaged.
    """
    if not Path(path).exists():
        return []
    return [
        Row(
            task=line.values["task"],
            seed=line.number("seed", int),
            variant=line.values["variant"],
            age=line.number("age", int),
            loss=line.values["loss"],
            quantity=line.values["quantity"],
            value=line.number("value", float),
            low=line.number("low", float),
            high=line.number("high", float),
            code=line.values["code"],
        )
        for line in csv_table.read_table(path, COLUMNS)
    ]


def write(path: str | Path, rows: Sequence[Row]) -> None:
    """Replace the file as a whole, with rows in the order of task, seed, variant and age; six digits of each number."""
    ordered = sorted(rows, key=lambda row: (row.task, row.seed, row.variant, row.age))
    numbers = ("value", "low", "high")
    lines = [asdict(row) | {name: f"{getattr(row, name):.6g}" for name in numbers} for row in ordered]
    csv_table.write_table(Path(path), COLUMNS, [list(line.values()) for line in lines])


def has(rows: Sequence[Row], key: Key) -> bool:
    """Whether the key has been measured."""
    return any(Key(row.task, row.seed, row.age, row.variant) == key for row in rows)
