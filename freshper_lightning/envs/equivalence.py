"""Whether an answer means the same as the right one, by math-verify.

``check_server.py`` loads this file in a process of its own; it imports nothing of this package.
"""

import re
from dataclasses import dataclass

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase, nan, zoo

_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MIXED = re.compile(r"(\d+)\s+(\d+)/(\d+)")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d*)?|[-+]?\.\d+)[eE]([-+]?\d+)")
_NAMED = re.compile(r"(\\?[A-Za-z]\w?)\s*=\s*([^=]*)")
_DECORATION = " \t\r\n*.`"
_CURRENCY = {"$": "dollars", "€": "euros", "£": "pounds"}
_PRICE = re.compile(r"(-?)\\?([$€£])\s*([\d.][^$]*)")
_CHARACTERS = str.maketrans(
    {"−": "-", "²": "^2", "³": "^3", "°": r"^\circ ", "·": r"\cdot ", "¢": r"\text{ cents}", "∞": r"\infty "}
)
_ROOT = re.compile(r"√\s*(\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d*\.?\d+|[^\W\d_]|\\[a-z]+\b(?!\s*\{)|\([^()]*\))")
_WORDS = re.compile(r"\\(?:text|textrm|textbf|textit|mbox)\s*\{([^{}]*)\}")
_TEXT = r"\\(?:text|textrm|textbf|textit|mbox|mathrm|operatorname)\s*\{([^{}]*)\}"
_GAP = r"((?:[\s~]|\\[ ,;:])*)"
_UNIT = re.compile(
    rf"(?:(.*[^\W_]|.*[)}}\]]){_GAP}{_TEXT}|(.*[\d)}}\]]){_GAP}((?!(?:or|and)\b)[A-Za-z][A-Za-z ^/.]*))(\^\{{?\d\}}?)?",
    re.DOTALL,
)
_BASE = re.compile(r"(-?\d[\dA-F.]*)_\{?(.+?)\}?")
_SYMBOL = (
    r"[cdkmn]m|[km]g|m[lL]|dL|ft|in|yd|mi|oz|lb|hr|am|pm|sq|cu|st|nd|rd|th|USD|EUR|GBP"
    r"|[kMGT][JWVAN]|[kKMGT]B|[kMG]?(?:Pa|Hz|eV)"
)
"""Units that stand for one right behind a number."""
_SPACED = rf"{_SYMBOL}|[mshgLJWVAN]|[mn][sgJWVAN]|US|[A-Za-z]{{3,}}"
"""Those that do behind a space; other letters are variables."""
_MEGA = re.compile(r"(?<=[\d\s{])M(?=(?:[JWVANBm]|Pa|Hz|eV)\b)")
_SAME_UNIT = {"usd": "dollar", "us dollar": "dollar", "eur": "euro", "gbp": "pound"}
_OTHER_VALUE = re.compile(
    r"\b(?:base|or|half|halves|thirds?|squared|cubed|factorial|negative|minus|plus|not|infinity|infinite"
    r"|dozens?|score|gross|zero|one|(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen)s?|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|(?:hundred|thousand|\w+illion)(?:th)?s?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie)ths?)\b"
)
_OPENING = re.compile(r"(?:\\left)?(\\\{|\(|\[)")
_COMMAND = re.compile(r"\\(?:mathrm|operatorname)\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[A-Za-z]+")
_WORD = re.compile(r"(?<![^\W\d_])(?!and(?![^\W\d_]))[^\W\d_]{3,}")
_INITIALS = re.compile(r"[A-Za-z]*[A-Z][A-Za-z]*(?<=..)")
_SPACED_DIGITS = re.compile(r"\d\s+\d")

EXAMPLE = ("1/2", "0.5")


def check(gold: str, answer: str | None) -> bool:
    """Whether ``answer`` has the value of ``gold``: numbers to six decimals, everything else symbolically.

    An answer counts only as a whole: prose, several values or several numbers side by side are not what one of them
    is. A unit may be left out but must not be another one, unless it makes another value, such as ``million`` or the
    base of a number. A percentage is both its number and its share. Words, letters of which one is a capital, and a
    right answer that cannot be read are compared as text, without their case.

    Without an ``answer`` it is whether ``gold`` can be read, or is prose, which need not be.
    """
    gold = _plain(gold) or gold
    if answer is None:
        right = _Answer.read(gold)
        return right.is_prose() or bool(_values(right.value))
    answer = _plain(answer) or answer
    if _folded(gold) == _folded(answer):
        return True
    shared = _shared_units(gold, answer)
    right, given = _Answer.read(gold, shared), _Answer.read(answer, shared)
    if right.is_prose() or not (expected := _values(right.value)):
        return False
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
    def read(cls, text: str, shared: frozenset[str] = frozenset()) -> "_Answer":
        name = ""
        if named := _NAMED.fullmatch(text):
            name, text = named[1], named[2].strip()
        if based := _BASE.fullmatch(text):
            return cls(name, based[1], f"base {based[2]}")
        measured = _UNIT.fullmatch(text)
        if measured is None:
            return cls(name, text, "")
        value, _, framed, bare_value, gap, bare, power = measured.groups(default="")
        if not (_is_unit(bare, _SPACED if gap else _SYMBOL, shared) if bare else _is_label(framed, shared)):
            return cls(name, text, "")
        unit = " ".join(re.sub(r"[\^{}]", "", framed + bare + power).split())
        return cls(name, value + bare_value, _folded(f" {unit}").strip())

    def differs_in_kind(self, other: "_Answer") -> bool:
        """Whether the two cannot be equal, whatever their values are: by name, unit, or braces around one of them."""
        if self.name and other.name and self.name != other.name:
            return True
        units = {_singular(self.unit), _singular(other.unit)}
        if len(units - {""}) == 2 or (len(units) == 2 and _OTHER_VALUE.search(f"{self.unit} {other.unit}")):
            return True
        openings = {match[1] for each in (self, other) if (match := _OPENING.match(each.value))}
        return len(openings) == 2 and r"\{" in openings

    def is_prose(self) -> bool:
        """Whether there is a further equation, or are words, which would be read as products of their letters."""
        words = _COMMAND.sub(" ", _WORDS.sub(r" \1 ", self.value))
        return "=" in words or _WORD.search(words) is not None or _INITIALS.fullmatch(self.value) is not None


def _shared_units(first: str, second: str) -> frozenset[str]:
    """Words of both texts that at least one of them frames as ``\\text{}``, which no variable is."""
    framed = " ".join(re.findall(_TEXT, first) + re.findall(_TEXT, second))
    return frozenset.intersection(*(frozenset(re.findall("[A-Za-z]+", text)) for text in (framed, first, second)))


def _is_unit(words: str, symbols: str, shared: frozenset[str]) -> bool:
    """Whether bare words behind a number are a unit, and no variables."""
    found = re.findall("[A-Za-z]+", words.replace(".", ""))
    return bool(found) and all(word in shared or re.fullmatch(symbols, word) for word in found)


def _is_label(framed: str, shared: frozenset[str]) -> bool:
    """Whether a text behind a value is a unit; one letter may be a variable, which is no unit of its own."""
    return not re.fullmatch(r"\s*[A-Za-z]\s*", framed) or _is_unit(framed, _SPACED, shared)


def _folded(text: str) -> str:
    """Without case, though mega stays apart from milli."""
    return _MEGA.sub("mega", text).casefold()


def _singular(unit: str) -> str:
    """One form for all that mean the same unit."""
    unit = re.sub(r"(?<=\w{3})s\b", "", unit)
    return _SAME_UNIT.get(unit, unit)


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
    text = _THOUSANDS.sub("", re.sub(r"\s*\bper ?cent\b", r"\\%", text))
    text = _ROOT.sub(lambda root: rf"\sqrt{{{_COMMA.sub('', root[1])}}}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    if match := _SCIENTIFIC.fullmatch(text):
        return rf"{match[1]} \cdot 10^{{{match[2]}}}"
    return text


def _values(gold: str) -> list[object]:
    """What math-verify reads in a right answer; nothing where it cannot, or where that is no value, as of ``1/0``."""
    values = _parse(gold)
    undefined = any(isinstance(value, Basic | MatrixBase) and value.has(nan, zoo) for value in values)
    return [] if undefined else values


def _parse(text: str) -> list[object]:
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    boxed = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    return list(parse(f"\\boxed{{{text}}}", boxed, "no_fallback", "first_match", parsing_timeout=None))
