"""Text that fits a terminal, whatever a policy may have said."""

import unicodedata
from collections.abc import Iterator


def width_of(character: str) -> int:
    """Columns that a terminal gives to a character: 0, 1 or 2."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def visible(text: str) -> str:
    """The text with control and format characters written out, line feeds apart: it cannot steer a terminal."""
    return "".join(c if c == "\n" or unicodedata.category(c) not in _UNSEEN else _escaped(c) for c in text)


_UNSEEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most ``width`` columns, broken behind a blank where there is one; nothing is left out.

    What a line goes on with is indented by ``indent``, at most ``width - 2``.
    """
    return [line for paragraph in visible(text).split("\n") for line in _broken(paragraph, width, " " * indent)]


def _broken(line: str, width: int, indent: str) -> Iterator[str]:
    start = 0
    while (end := _fitting(line, width)) < len(line):
        blank = line.rfind(" ", start, end) + 1
        end = blank if blank > start else end
        yield line[:end]
        line, start = indent + line[end:], len(indent)
    yield line


def _fitting(line: str, width: int) -> int:
    """Number of characters of ``line`` that fit."""
    used = 0
    for count, character in enumerate(line):
        used += width_of(character)
        if used > width:
            return count
    return len(line)
