"""Mathematical questions from a JSONL file or a data set, answered in one or several attempts."""

import logging
from functools import cache
from typing import Literal, get_args

from freshper_lightning.envs.checker import CheckerPool, CheckLimits, shared_pool
from freshper_lightning.envs.protocol import tagged_answer
from freshper_lightning.envs.question import MAX_ANSWER, QuestionEnv
from freshper_lightning.envs.questions import (
    MARKER,
    Answers,
    Question,
    QuestionSet,
    QuestionSource,
    identity,
    obvious,
    read_number,
)

log = logging.getLogger(__name__)

Form = Literal["marker", "tag"]
"""Where a reply gives its answer: in a last line behind ``####``, or in ``<answer>`` tags."""

_MARKED = f"Solve the problem. End with a line that holds only {MARKER} and the answer"
_TAGGED = "Solve the problem. Think first, then give the answer"
INSTRUCTIONS: dict[tuple[Form, Answers], str] = {
    ("marker", "number"): f"{_MARKED} as a number, like this:\n{MARKER} 7",
    ("marker", "expression"): f"{_MARKED}, like this:\n{MARKER} \\frac{{1}}{{2}}",
    ("tag", "number"): f"{_TAGGED} as a number, like this: <answer>7</answer>",
    ("tag", "expression"): f"{_TAGGED}, like this: <answer>\\frac{{1}}{{2}}</answer>",
}


def marked_answer(reply: str) -> str | None:
    """What stands behind ``####`` in the last line of ``reply``, blank ones aside; nothing for any other reply."""
    line = reply.rstrip().rpartition("\n")[2].strip()
    answer = line.removeprefix(MARKER).strip()
    return answer if line.startswith(MARKER) and answer else None


class MathQuestion(QuestionEnv):
    """A question of the source; the seed of ``reset`` chooses it, uniformly and with nothing else.

    The right answer scores 1, another one in the form asked for ``format_reward``, and everything else 0. As a
    ``number`` the answer is compared exactly by value (``1,000.0`` is ``1000``); as an ``expression`` it is checked by
    math-verify, as a whole, in a process of its own with a time limit: a check without a verdict raises and so costs
    the episode, never its reward. The source is read once per process; so are its expressions by math-verify, which
    takes about 5 ms each. Those that it cannot read are compared as text, and a warning says how many they are.

    Args:
        path: JSONL file of objects; exactly one of ``path`` and ``dataset`` must be given.
        dataset: Name or folder for ``datasets.load_dataset``.
        config: Configuration of the data set.
        split: Split of the data set, ``train`` where it is not given; ``train[:60]`` is a part of one.
        question_field: Holds the question.
        answer_field: Holds the answer, or a solution that ends in ``#### answer`` or in ``\\boxed{answer}``.
        answers: Whether answers are numbers or expressions.
        form: Where a reply gives its answer.
        attempts: Replies per question, at least 1.
        format_reward: Score of a wrong answer in the form asked for, in [0, 1).
        checkers: Expressions checked at once, each in a process of its own.
        check_seconds: Time that one check may take.

    Raises:
        ValueError: The source cannot be read, is empty, has a row without question or answer, or two answers to one
            question, or an argument is out of range; the message names the argument.
        CheckError: The checkers do not work, or one answer of the source is too much for their limits, as each reply
            to its question would be.
    """

    def __init__(
        self,
        path: str | None = None,
        dataset: str | None = None,
        config: str | None = None,
        split: str | None = None,
        question_field: str = "question",
        answer_field: str = "answer",
        answers: Answers = "number",
        form: Form = "marker",
        attempts: int = 1,
        format_reward: float = 0.1,
        checkers: int = 2,
        check_seconds: float = 10.0,
    ) -> None:
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {', '.join(get_args(Form))}, not {form!r}")
        if not isinstance(format_reward, int | float) or not 0 <= format_reward < 1:
            raise ValueError(f"format_reward must be in [0, 1), not {format_reward!r}")
        limits = CheckLimits(checkers, check_seconds)
        source = QuestionSource(path, dataset, config, split, question_field, answer_field, answers)
        self._pool = shared_pool(limits) if answers == "expression" else None
        self._source = _checked(source, limits)
        self.questions = self._source.questions
        self.answers, self.form, self.format_reward = answers, form, format_reward
        self.question: Question
        super().__init__(INSTRUCTIONS[form, answers], attempts, self._source.longest(), self._source.charset())

    @property
    def instances(self) -> frozenset[str]:
        """What tells the questions from those of another source."""
        return self._source.identities()

    def draw(self, seed: int | None) -> str:
        """The text of a question of the source."""
        self.question = self.questions[int(self.np_random.integers(len(self.questions)))]
        return self.question.text

    def read(self, reply: str) -> str | None:
        """The answer in the form asked for, as far as it can be one."""
        answer = tagged_answer(reply, MAX_ANSWER) if self.form == "tag" else marked_answer(reply)
        if answer is None or self._pool is None:
            return answer if answer is not None and read_number(answer) is not None else None
        return answer if len(answer) <= MAX_ANSWER else None

    def score(self, answer: str) -> float:
        """1 for the right answer, ``format_reward`` for another.

        Raises:
            CheckError: There is no verdict.
        """
        return 1.0 if _same(self.question.answer, answer, self._pool) else self.format_reward

    def close(self) -> None:
        """Let go of the checkers, which end with the last environment that needs them."""
        self._pool = None


def _same(gold: str, answer: str, pool: CheckerPool | None) -> bool:
    """Whether the two are equal, by value without a pool and by its checks with one."""
    if pool is None:
        return read_number(gold) == read_number(answer)
    verdict = obvious(gold, answer)
    return pool.check(gold, answer) if verdict is None else verdict


@cache
def _checked(source: QuestionSource, limits: CheckLimits) -> QuestionSet:
    """The questions of ``source``, one answer to each.

    Raises:
        ValueError: There are several; the message has the number of such rows and the first of them.
        CheckError: There is no verdict about an answer.
    """
    questions, answers = source.read(), dict[str, str]()
    pool = shared_pool(limits) if source.answers == "expression" else None
    faults, unread = [], []
    for number, question in enumerate(questions.questions, start=1):
        row = f"row {number} has {source.answer_field}={question.answer!r}"
        if pool is not None and read_number(question.answer) is None and not pool.check(question.answer, None):
            unread.append(row)
        first = answers.setdefault(identity(question.text), question.answer)
        if first != question.answer and not _same(first, question.answer, pool):
            faults.append(f"{row}, which must be {first!r} as in an earlier row with the same question")
    if faults:
        some = "; ".join(faults[:3])
        raise ValueError(f"{source}: {len(faults)} of {len(questions.questions)} rows do not fit: {some}")
    if unread:
        share = f"{len(unread)} of {len(questions.questions)} answers"
        log.warning("%s: %s cannot be read by math-verify and are compared as text: %s", source, share, unread[0])
    return questions
