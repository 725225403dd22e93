"""Text files of the user's, line by line."""

from collections.abc import Iterator
from pathlib import Path


def read_lines(path: str | Path, key: str, kind: str) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends, a byte order mark aside.

    Args:
        path: The file.
        key: The setting that the path came from, with which every message opens.
        kind: What the file must be, for the message.

    Raises:
        ValueError: The file is not there, cannot be read, or has a line that is not UTF-8; the message names it.
    """
    where = f"{key}={str(path)!r}"
    try:
        if not Path(path).is_file():
            raise ValueError(f"{where} is not a file; it must be {kind}")
        # A strict decoder would fail for a block of the file at once, without saying in which line.
        with Path(path).open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                _require_utf8(line, f"{where}: line {number}")
                yield line
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error}; it must be {kind}") from error


def _require_utf8(line: str, where: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        found = f"byte {ord(line[error.start]) & 0xFF:#x} in column {error.start + 1}"
        raise ValueError(f"{where} is not UTF-8, which it must be: {found}") from error
