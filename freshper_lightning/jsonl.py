"""Files with one JSON object per line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path, key: str) -> Iterator[dict[str, Any]]:
    """The objects of the file in its order; blank lines count for nothing.

    Raises:
        ValueError: The file is not there, or a line is not a JSON object; the message opens with ``key``, the setting
            that the path came from.
    """
    where = f"{key}={str(path)!r}"
    if not Path(path).is_file():
        raise ValueError(f"{where} is not a file; it must be a JSONL file")
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _object(line, f"{where}: line {number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a JSON object, not {line.strip()[:80]}")
    return row
