"""Files with one JSON object per line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freshper_lightning.text_file import read_lines


def read_jsonl(path: str | Path, key: str) -> Iterator[dict[str, Any]]:
    """The objects of the file in its order; blank lines count for nothing.

    Raises:
        ValueError: The file is not there or cannot be read, or a line is not a JSON object; the message opens with
            ``key``, the setting that the path came from.
    """
    for number, line in enumerate(read_lines(path, key, "a JSONL file"), start=1):
        if line.strip():
            yield _object(line, f"{key}={str(path)!r}: line {number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply; it must be a JSON object") from error
    except ValueError as error:  # that of a number with thousands of digits is no JSONDecodeError
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a JSON object, not {line.strip()[:80]}")
    return row
