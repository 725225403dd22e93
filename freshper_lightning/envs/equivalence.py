"""Whether an answer means the same as the right one, by math-verify.

``check_server.py`` loads this file in a process of its own; it imports nothing of this package.
"""

import re
from dataclasses import dataclass

from math_verify import LatexExtractionConfig, parse, verify

_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_MIXED = re.compile(r"(\d+)\s+(\d+)/(\d+)")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d*)?|[-+]?\.\d+)[eE]([-+]?\d+)")
_NAMED = re.compile(r"(\\?[A-Za-z]\w?)\s*=\s*([^=]*)")
_DECORATION = " \t\r\n*$.`"
_TEXT = r"\\(?:text|textrm|textbf|textit|mbox|mathrm|operatorname)\s*\{([^{}]*)\}"
_BARE_UNIT = r"[\s~]((?!(?:or|and)\b)[A-Za-z][A-Za-z ^/²³.]*)"
_UNIT = re.compile(rf"(.*[\d)}}\]])(?:[\s~]|\\[ ,;:])*(?:{_TEXT}|{_BARE_UNIT})", re.DOTALL)
_COMMAND = re.compile(rf"{_TEXT}|\\(?:begin|end)\{{\w+\}}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_SPACED_DIGITS = re.compile(r"\d\s+\d")
_MULTIPLES = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen)s?\b")


EXAMPLE = ("1/2", "0.5")


class GoldError(Exception):
    """The right answer cannot be read."""


def check(gold: str, answer: str) -> bool:
    """Whether ``answer`` has the value of ``gold``: numbers to six decimals, everything else symbolically.

    An answer counts only as a whole: prose, several values or several numbers side by side are not what one of them
    is. A unit may be left out but must not be another one, and a percentage is both its number and its share. Words
    are compared as text, without their case.

    Raises:
        GoldError: ``gold`` cannot be read.
    """
    gold, answer = _plain(gold), _plain(answer)
    if gold and gold.casefold() == answer.casefold():
        return True
    right, given = _Answer.read(gold), _Answer.read(answer)
    if given.differs_in_kind(right) or right.is_prose():
        return False
    expected = _parse(right.value)
    if not expected:
        raise GoldError(f"the right answer {gold!r} cannot be read")
    if given.is_prose() or _SPACED_DIGITS.search(given.value):
        return False
    return bool(verify(expected, _parse(given.value), timeout_seconds=None, raise_on_error=True))


@dataclass(frozen=True, slots=True)
class _Answer:
    """``x = 5 cm`` in its parts; name and unit are empty where there is none."""

    name: str
    value: str
    unit: str

    @classmethod
    def read(cls, text: str) -> "_Answer":
        name = ""
        if named := _NAMED.fullmatch(text):
            name, text = named[1], named[2].strip()
        measured = _UNIT.fullmatch(text)
        if measured is None:
            return cls(name, text, "")
        unit = " ".join((measured[2] or measured[3] or "").casefold().split())
        if _MULTIPLES.search(unit):
            return cls(name, text, "")
        # A single letter may be a variable: what it is, math-verify knows better.
        return cls(name, text if len(unit) == 1 else measured[1], unit)

    def differs_in_kind(self, other: "_Answer") -> bool:
        """Whether both name a variable, or both have a unit, and it is not the same."""
        return any(mine and its and mine != its for mine, its in ((self.name, other.name), (self.unit, other.unit)))

    def is_prose(self) -> bool:
        """Whether there is a further equation, or are words, which would be read as products of their letters."""
        return "=" in self.value or _WORD.search(_COMMAND.sub(" ", self.value)) is not None


def _plain(text: str) -> str:
    """``text`` without decoration, numbers written in the one way that math-verify reads for certain."""
    text = text.replace("−", "-").strip(_DECORATION).removeprefix("\\$")
    if match := re.fullmatch(_TEXT, text):
        text = match[1].strip()
    text = re.sub(r"\s*\bper ?cent\b", r"\\%", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _THOUSANDS.sub("", text))
    if match := _SCIENTIFIC.fullmatch(text):
        return rf"{match[1]} \cdot 10^{{{match[2]}}}"
    return text


def _parse(text: str) -> list[object]:
    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    return list(parse(f"\\boxed{{{text}}}", boxed, "no_fallback", "first_match", parsing_timeout=None))
