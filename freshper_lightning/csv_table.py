"""Tables of results as CSV files that people may have edited: every line is checked before it counts."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.text_file import read_lines

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Line:
    """The values of one line by column, as text."""

    values: dict[str, str]
    place: str
    """File and line, for messages."""

    def number(self, column: str, kind: type[Number]) -> Number:
        """The value of a column.

        Raises:
            ConfigurationError: It is no number of that kind.
        """
        try:
            return kind(self.values[column])
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"{self.place}: {column}={self.values[column]} must be {what}") from error


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Replace the file at once, with a header; a file that is there is whole whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_table(path: str | Path, columns: Sequence[str]) -> Iterator[Line]:
    """The lines of a table with these columns and no others.

    Raises:
        ConfigurationError: There is no such file, it is not UTF-8, has other columns, or a line has too few or too many
            values.
    """
    try:
        text = list(read_lines(path, "table", "a CSV file"))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    reader = csv.DictReader(text)
    try:
        if list(reader.fieldnames or ()) != list(columns):
            raise ConfigurationError(
                f"{path} must have the columns {', '.join(columns)}, and no others; one of another version cannot be"
                " continued: give another --folder"
            )
        for values in reader:
            place = f"{path}, line {reader.line_num}"
            if None in values or None in values.values():
                raise ConfigurationError(f"{place} must have {len(columns)} values")
            yield Line(values, place)
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {reader.line_num}: {error}") from error
