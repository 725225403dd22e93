"""Dataclasses as rows of a CSV file."""

import csv
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

_Row = TypeVar("_Row")


def read(path: Path, kind: type[_Row]) -> list[_Row]:
    """All rows; none where there is no file. Fields are text, whole numbers, truth values, or numbers that may lack."""
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(kind)}
    with path.open(newline="") as file:
        return [kind(**{name: _value(row[name], types[name]) for name in types}) for row in csv.DictReader(file)]


def _value(text: str, kind: object) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return text == "True"
    if kind is int:
        return int(text)
    return float(text) if text else None


def require_own_table(options: Namespace, parser: ArgumentParser, *keys: str) -> None:
    """Refuse to put rows that were measured with other settings into the table of those with the default ones.

    Raises:
        SystemExit: One of the keys is not at its default, and ``table`` is.
    """
    for key in keys:
        if getattr(options, key) != parser.get_default(key) and options.table == parser.get_default("table"):
            name = key.replace("_", "-")
            parser.error(f"--{name}={getattr(options, key)} is not what {options.table} is of; give another --table")


def write(path: Path, rows: Sequence[Any]) -> None:
    """Replaces the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    temporary.replace(path)
