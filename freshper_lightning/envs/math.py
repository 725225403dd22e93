"""Questions with a number for an answer, one reply each, from a JSONL file or a data set."""

import importlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from freshper_lightning.envs.protocol import ReplySpace

MARKER = "####"
"""Stands ahead of the final answer, in GSM8K's solutions and in the replies that are asked for."""

RIGHT, PARSED, UNPARSED = 1.0, 0.1, 0.0
"""Rewards of the right number, of another number in the format asked for, and of everything else."""

INSTRUCTION = (
    f"Solve the problem. End with a line that holds only {MARKER} and the answer as a number, like this:\n{MARKER} 7"
)

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


def parse_reply(reply: str) -> Decimal | None:
    """The number of a reply whose last line, blank ones aside, is ``#### number``; nothing for any other reply."""
    line = reply.rstrip().rpartition("\n")[2].strip()
    return read_number(line.removeprefix(MARKER)) if line.startswith(MARKER) else None


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the one number that answers it."""

    text: str
    answer: Decimal


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """All questions of a source, at least one, in the order of the source."""

    questions: tuple[Question, ...]
    charset: frozenset[str]
    """Characters that occur in them."""
    longest: int
    """Characters of the longest."""


class MathQuestion(gymnasium.Env[str, str]):
    """One question and one reply; the seed of ``reset`` chooses the question, uniformly and with nothing else.

    Reward, graded so that groups differ before the policy can solve anything: 1 for the right number, 0.1 for another
    number in the format asked for, 0 for everything else. Only a last line of the form ``#### number`` is read; two
    numbers are equal where their values are (``1,000.0`` is ``1000``). The source is read once per process.

    Args:
        path: JSONL file of objects; exactly one of ``path`` and ``dataset`` must be given.
        dataset: Name or folder for ``datasets.load_dataset``.
        config: Configuration of the data set.
        split: Split of the data set.
        question_field: Holds the question.
        answer_field: Holds a number, or a solution that ends in ``#### number`` as in GSM8K.

    Raises:
        ValueError: The source cannot be read, is empty, or has a row without question or answer; the message names
            the argument.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium declares it as an instance variable)

    def __init__(
        self,
        path: str | None = None,
        dataset: str | None = None,
        config: str | None = None,
        split: str = "train",
        question_field: str = "question",
        answer_field: str = "answer",
    ) -> None:
        if path is not None and dataset is None:
            source = _read_jsonl(path, question_field, answer_field)
        elif dataset is not None and path is None:
            source = _read_dataset(dataset, config, split, question_field, answer_field)
        else:
            raise ValueError(f"exactly one of path and dataset must be given, not path={path!r}, dataset={dataset!r}")
        self.questions = source.questions
        self.question: Question | None = None
        charset = source.charset | frozenset(string.printable)
        self.observation_space = Text(len(INSTRUCTION) + 2 + source.longest, charset=charset)
        self.action_space = ReplySpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the question that ``seed`` determines and return it below the instruction."""
        super().reset(seed=seed)
        self.question = self.questions[int(self.np_random.integers(len(self.questions)))]
        return f"{INSTRUCTION}\n\n{self.question.text}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge the reply; the episode is over.

        Raises:
            gymnasium.error.ResetNeeded: The question has been answered.
        """
        if self.question is None:
            raise gymnasium.error.ResetNeeded("the question has been answered; call reset")
        number, answer = parse_reply(action), self.question.answer
        self.question = None
        success = number == answer
        reward = RIGHT if success else UNPARSED if number is None else PARSED
        return f"Reward: {reward:g}", reward, True, False, {"valid": number is not None, "success": success}


@cache
def _read_jsonl(path: str, question_field: str, answer_field: str) -> QuestionSet:
    if not Path(path).is_file():
        raise ValueError(f"path={path!r} is not a file; it must be a JSONL file of questions")
    return _question_set(f"path={path!r}", _json_rows(path), question_field, answer_field)


def _json_rows(path: str) -> Iterator[Mapping[str, Any]]:
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"path={path!r}: line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"path={path!r}: line {number} must be a JSON object, not {line.strip()[:80]}")
            yield row


@cache
def _read_dataset(name: str, config: str | None, split: str, question_field: str, answer_field: str) -> QuestionSet:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"dataset={name!r} needs the package datasets: pip install 'freshper-lightning[datasets]', or use path"
        ) from error
    source = f"dataset={name!r}, config={config!r}, split={split!r}"
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (ValueError, OSError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    return _question_set(source, rows, question_field, answer_field)


def _question_set(
    source: str, rows: Iterable[Mapping[str, Any]], question_field: str, answer_field: str
) -> QuestionSet:
    questions = tuple(
        _question(f"{source}: row {number}", row, question_field, answer_field)
        for number, row in enumerate(rows, start=1)
    )
    if not questions:
        raise ValueError(f"{source} holds no questions")
    charset = frozenset(character for question in questions for character in question.text)
    return QuestionSet(questions, charset, max(len(question.text) for question in questions))


def _question(where: str, row: Mapping[str, Any], question_field: str, answer_field: str) -> Question:
    for key, name in (("question_field", question_field), ("answer_field", answer_field)):
        if name not in row:
            raise ValueError(f"{where} has no {key}={name!r}; its fields are {', '.join(row)}")
    text, solution = row[question_field], row[answer_field]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {question_field} must be a text, not {text!r}")
    answer = read_number(str(solution).rpartition(MARKER)[2])
    if answer is None:
        raise ValueError(f"{where}: {answer_field} must be a number or end in '{MARKER} number', not {solution!r}")
    return Question(text.strip(), answer)
