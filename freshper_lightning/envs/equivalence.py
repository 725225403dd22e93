"""Whether an answer means the same as the right one, by math-verify.

``check_server.py`` loads this file in a process of its own; it imports nothing of this package.
"""

import re
from dataclasses import dataclass

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_MIXED = re.compile(r"(\d+)\s+(\d+)/(\d+)")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d*)?|[-+]?\.\d+)[eE]([-+]?\d+)")
_NAMED = re.compile(r"(\\?[A-Za-z]\w?)\s*=\s*([^=]*)")
_DECORATION = " \t\r\n*.`"
_CURRENCY = {"$": "dollars", "€": "euros", "£": "pounds"}
_PRICE = re.compile(r"(-?)\\?([$€£])\s*([\d.][^$]*)")
_CHARACTERS = str.maketrans(
    {"−": "-", "²": "^2", "³": "^3", "°": r"^\circ ", "·": r"\cdot ", "¢": r"\text{ cents}", "∞": r"\infty "}
)
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\([^()]*\))")
_WORDS = re.compile(r"\\(?:text|textrm|textbf|textit|mbox)\s*\{([^{}]*)\}")
_TEXT = r"\\(?:text|textrm|textbf|textit|mbox|mathrm|operatorname)\s*\{([^{}]*)\}"
_GAP = r"((?:[\s~]|\\[ ,;:])*)"
_UNIT = re.compile(
    rf"(?:(.*[\w)}}\]]){_GAP}{_TEXT}|(.*[\d)}}\]]){_GAP}((?!(?:or|and)\b)[A-Za-z][A-Za-z ^/.]*))(\^\{{?\d\}}?)?",
    re.DOTALL,
)
_BASE = re.compile(r"(-?\d[\dA-F.]*)_\{?(.+?)\}?")
_SYMBOLS = (
    *("cm", "mm", "km", "nm", "dm", "kg", "mg", "ml", "mL", "dL"),
    *("ft", "in", "yd", "mi", "oz", "lb", "hr", "Hz", "am", "pm", "sq", "cu"),
)
_LETTERS = frozenset("mshgL")
"""Units that stand for one behind a space alone, as other letters are variables."""
_OTHER_VALUE = re.compile(
    r"\b(?:base|or|dozen|half|halves?|third|squared|cubed|factorial|negative|minus|plus|not|(?:hundred|thousand"
    r"|\w+illion)(?:th)?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie)th)\b"
)
_OPENING = re.compile(r"(?:\\left)?(\\\{|\(|\[)")
_COMMAND = re.compile(r"\\(?:mathrm|operatorname)\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?<![^\W\d_])(?!and(?![^\W\d_]))[^\W\d_]{3,}")
_INITIALS = re.compile(r"[A-Za-z]*[A-Z][A-Za-z]*(?<=..)")
_SPACED_DIGITS = re.compile(r"\d\s+\d")

EXAMPLE = ("1/2", "0.5")


class GoldError(Exception):
    """The right answer cannot be read."""


def check(gold: str, answer: str) -> bool:
    """Whether ``answer`` has the value of ``gold``: numbers to six decimals, everything else symbolically.

    An answer counts only as a whole: prose, several values or several numbers side by side are not what one of them
    is. A unit may be left out but must not be another one, unless it makes another value, such as ``million`` or the
    base of a number. A percentage is both its number and its share. Words, and letters of which one is a capital, are
    compared as text, without their case.

    Raises:
        GoldError: ``gold`` cannot be read.
    """
    gold, answer = _plain(gold), _plain(answer)
    if gold and gold.casefold() == answer.casefold():
        return True
    right, given = _Answer.read(gold), _Answer.read(answer)
    if right.is_prose():
        return False
    expected = _parse(right.value)
    if not expected:
        raise GoldError(f"the right answer {gold!r} cannot be read")
    if given.differs_in_kind(right) or given.is_prose() or _SPACED_DIGITS.search(given.value):
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
        if based := _BASE.fullmatch(text):
            return cls(name, based[1], f"base {based[2]}")
        measured = _UNIT.fullmatch(text)
        if measured is None:
            return cls(name, text, "")
        value, _, framed, bare_value, gap, bare, power = measured.groups(default="")
        if bare and not _is_unit(bare, spaced=gap != ""):
            return cls(name, text, "")
        unit = re.sub(r"[\^{}]", "", framed + bare + power).casefold()
        return cls(name, value + bare_value, " ".join(re.sub(r"(?<=\w{3})s\b", "", unit).split()))

    def differs_in_kind(self, other: "_Answer") -> bool:
        """Whether the two cannot be equal, whatever their values are: by name, unit, or braces around one of them."""
        if self.name and other.name and self.name != other.name:
            return True
        units = {self.unit, other.unit}
        if len(units - {""}) == 2 or (len(units) == 2 and _OTHER_VALUE.search(" ".join(units))):
            return True
        openings = {match[1] for each in (self, other) if (match := _OPENING.match(each.value))}
        return len(openings) == 2 and r"\{" in openings

    def is_prose(self) -> bool:
        """Whether there is a further equation, or are words, which would be read as products of their letters."""
        words = _COMMAND.sub(" ", _WORDS.sub(r" \1 ", self.value))
        return "=" in words or _WORD.search(words) is not None or _INITIALS.fullmatch(self.value) is not None


def _is_unit(words: str, spaced: bool) -> bool:
    """Whether bare words behind a number are a unit, and no variables."""
    found = re.findall("[A-Za-z]+", words.replace(".", ""))
    return bool(found) and all(word in _SYMBOLS or (spaced and (len(word) > 2 or word in _LETTERS)) for word in found)


def _plain(text: str) -> str:
    """``text`` without decoration, numbers written in the one way that math-verify reads for certain."""
    text = text.translate(_CHARACTERS).strip(_DECORATION)
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip(_DECORATION)
    if priced := _PRICE.fullmatch(text):
        text = f"{priced[1]}{priced[3]} {_CURRENCY[priced[2]]}"
    text = text.strip(_DECORATION + "$")
    if match := re.fullmatch(_TEXT, text):
        text = match[1].strip()
    text = _ROOT.sub(r"\\sqrt{\1}", re.sub(r"\s*\bper ?cent\b", r"\\%", text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _THOUSANDS.sub("", text))
    if match := _SCIENTIFIC.fullmatch(text):
        return rf"{match[1]} \cdot 10^{{{match[2]}}}"
    return text


def _parse(text: str) -> list[object]:
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    boxed = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    return list(parse(f"\\boxed{{{text}}}", boxed, "no_fallback", "first_match", parsing_timeout=None))
