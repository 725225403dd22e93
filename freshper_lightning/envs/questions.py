"""Questions with one answer each, from a JSONL file or a data set."""

import importlib
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache
from typing import Any, Literal, get_args

from freshper_lightning.jsonl import read_jsonl

MARKER = "####"
"""Stands ahead of the final answer in GSM8K's solutions."""
_BOXED = "\\boxed{"

Answers = Literal["number", "expression"]
"""What the answers are: numbers in decimal notation, or whatever math-verify reads."""

_NUMBER = re.compile(r"([-+]?)\$?([-+]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)((?:\.[0-9]+)?)\s?%?\.?")


def read_number(text: str) -> Decimal | None:
    """The number that ``text`` is, exactly, or nothing where it is anything else.

    Decimal notation with one optional sign; a dollar sign ahead, commas between thousands, a percent sign and a full
    stop behind do not matter.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    outer, inner, whole, fraction = match.groups()
    if not whole + fraction or (outer and inner):
        return None
    return Decimal(f"{outer}{inner}{whole.replace(',', '')}{fraction}")


def obvious(gold: str, answer: str) -> bool | None:
    """The verdict where both are numbers in decimal notation, compared exactly; percentages are not obvious."""
    right, given = read_number(gold), read_number(answer)
    if right is None or given is None:
        return None
    return True if right == given else None if "%" in gold + answer else False


def final_answer(solution: str) -> str:
    """The text behind the last ``####`` of ``solution``, else in its last ``\\boxed{}``, else all of it."""
    if MARKER in solution:
        return solution.rpartition(MARKER)[2].strip()
    _, boxed, rest = solution.rpartition(_BOXED)
    return _up_to_closing_brace(rest).strip() if boxed else solution.strip()


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return text


_QUOTES = str.maketrans("‘’‚‛`´′“”„‟«»″", "'" * 7 + '"' * 7)
_RAISED = {"<super>": "^", "<sub>": "_"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the one answer to it."""

    text: str
    answer: str


def identity(question: str) -> str:
    """Equal for texts of questions that differ in case, white space, invisible characters or encoding alone.

    Forms of quotation marks and of dashes are one, and those of a letter that NFKC makes one; a power stays apart
    from a digit.
    """
    text = "".join(map(_plain_character, question.translate(_QUOTES)))
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


@cache
def _plain_character(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cf":
        return ""
    if category == "Pd" or character == "−":
        return "-"
    return _RAISED.get(unicodedata.decomposition(character).partition(" ")[0], "") + character


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """All questions of a source, at least one, in the order of the source."""

    questions: tuple[Question, ...]

    def charset(self) -> frozenset[str]:
        """Characters that occur in them."""
        return frozenset(character for question in self.questions for character in question.text)

    def longest(self) -> int:
        """Characters of the longest."""
        return max(len(question.text) for question in self.questions)

    def identities(self) -> frozenset[str]:
        """What tells them from those of another source."""
        return frozenset(identity(question.text) for question in self.questions)


@dataclass(frozen=True)
class QuestionSource:
    """Where questions come from; equal sources are read once per process.

    Raises:
        ValueError: Not exactly one of ``path`` and ``dataset`` is given, ``config`` or ``split`` is given with a
            ``path``, an argument is no text, or ``answers`` is unknown.
    """

    path: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    """``train`` where it is not given."""
    question_field: str = "question"
    answer_field: str = "answer"
    answers: Answers = "number"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, str) and value) and not (value is None and field.default is None):
                raise ValueError(f"{field.name} must be a text, not {value!r}")
        if (self.path is None) == (self.dataset is None):
            raise ValueError(
                f"exactly one of path and dataset must be given, not path={self.path!r}, dataset={self.dataset!r}"
            )
        for name in ("config", "split"):
            if self.path is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be left out with path={self.path!r}, not {getattr(self, name)!r}: a file has none"
                )
        if self.answers not in get_args(Answers):
            raise ValueError(f"answers must be one of {', '.join(get_args(Answers))}, not {self.answers!r}")

    def __str__(self) -> str:
        """As error messages name it."""
        if self.path is not None:
            return f"path={self.path!r}"
        return f"dataset={self.dataset!r}, config={self.config!r}, split={self._split()!r}"

    def read(self) -> QuestionSet:
        """All questions.

        Raises:
            ValueError: The source cannot be read, is empty, or has a row without question or answer; the message
                names the argument.
        """
        return _read(self)

    def _split(self) -> str:
        return self.split or "train"

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        return read_jsonl(self.path, "path") if self.path is not None else self._dataset_rows()

    def _dataset_rows(self) -> Iterable[Mapping[str, Any]]:
        try:
            datasets = importlib.import_module("datasets")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"dataset={self.dataset!r} needs the package datasets: pip install -e '.[datasets]', or use path"
            ) from error
        try:
            rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(self.dataset, self.config, split=self._split())
        except (ValueError, OSError) as error:
            raise ValueError(f"{self} cannot be loaded: {error}") from error
        return rows

    def _question(self, number: int, row: Mapping[str, Any]) -> Question:
        for key in ("question_field", "answer_field"):
            if getattr(self, key) not in row:
                raise ValueError(
                    f"{self}: row {number} has no {key}={getattr(self, key)!r}; its fields are {', '.join(row)}"
                )
        text, given = row[self.question_field], row[self.answer_field]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{self}: row {number}: {self.question_field} must be a text, not {text!r}")
        answer = final_answer(_written(given))
        if not answer or (self.answers == "number" and read_number(answer) is None):
            allowed = "a number or end in '#### number'" if self.answers == "number" else "a text or a number"
            raise ValueError(f"{self}: row {number}: {self.answer_field} must be {allowed}, not {given!r}")
        return Question(text.strip(), answer)


def _written(value: object) -> str:
    """A text as it is, a number in decimal notation, and nothing of anything else, which is no answer."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{Decimal(repr(value)):f}"
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


@cache
def _read(source: QuestionSource) -> QuestionSet:
    questions = tuple(source._question(number, row) for number, row in enumerate(source._rows(), start=1))
    if not questions:
        raise ValueError(f"{source} holds no questions")
    return QuestionSet(questions)
