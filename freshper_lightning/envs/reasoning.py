"""The procedural tasks of reasoning-gym, one question per episode."""

import importlib
import zlib
from decimal import localcontext
from typing import Any

from freshper_lightning.envs.checker import CheckerPool, CheckLimits, Checks, shared_pool
from freshper_lightning.envs.own_random import OwnRandom
from freshper_lightning.envs.protocol import tagged_answer
from freshper_lightning.envs.question import QuestionEnv

MAX_QUESTION, MAX_ANSWER = 20_000, 4096
"""Characters; some tasks ask for whole grids."""
MAX_DRAWS = 1000
NONSENSE = "?"
"""Right in no task."""
CONSTANTS = ("0", "1", "None", "True", "False")
"""Right in some tasks, and in none for different right answers."""
PROBES = 5
"""Questions that are tried before the first use of a task."""
SCORES = Checks(
    "reasoning_scorer.py", ("reasoning_gym", "psutil"), "this environment", "pip install -e '.[reasoning-gym]'"
)

INSTRUCTION = "Answer the question. Think first, then give the answer alone in <answer>...</answer>."


class ReasoningGym(QuestionEnv):
    """A question of one task of reasoning-gym, scored by the task; only its full score, 1, counts.

    Many of its scorers give a share to an answer that merely contains the right one, so a smaller score is 0 here. The
    question depends on the seed of ``reset`` alone, and an even seed never gives a question of an odd one: training and
    held-out seeds differ in parity. An answer is scored in a process of its own with a time limit, where no code in it
    runs: a score that comes late or not at all raises and so costs the episode, never its reward. An answer of a shape
    that the scorer does not expect scores 0. Needs the extra ``reasoning-gym``.

    Args:
        task: Name of the data set in reasoning-gym, such as ``chain_sum``.
        config: Its settings.
        attempts: Replies per question, at least 1.
        checkers: Answers scored at once, each in a process of its own.
        check_seconds: Time that one score may take.

    Raises:
        ValueError: reasoning-gym is not installed, refuses ``task`` or ``config``, takes one answer for right whatever
            the right one is, or refuses its own, the task is not one of its own, or has other questions in every
            process, or an argument is out of range.
        CheckError: The checkers do not work.
    """

    def __init__(
        self,
        task: str,
        config: dict[str, Any] | None = None,
        attempts: int = 1,
        checkers: int = 2,
        check_seconds: float = 10.0,
    ) -> None:
        self.task, self.config = task, config or {}
        self._entry: dict[str, Any]
        self._pool: CheckerPool | None = shared_pool(CheckLimits(checkers, check_seconds), SCORES)
        self._library = importlib.import_module("reasoning_gym")
        if (key := repr((task, self.config))) not in _SOUND:
            self._require_sound()
            _SOUND.add(key)
        super().__init__(INSTRUCTION, attempts, MAX_QUESTION)

    def draw(self, seed: int | None) -> str:
        """The first question of the parity of ``seed``, of those that the generator gives.

        Raises:
            RuntimeError: The task has no such question among many.
        """
        for _ in range(MAX_DRAWS):
            self._entry = self._generated(int(self.np_random.integers(2**31)))
            question = str(self._entry["question"])
            if seed is None or zlib.crc32(question.encode()) % 2 == seed % 2:
                return question
        raise RuntimeError(f"task {self.task!r} gave no question of parity {(seed or 0) % 2} in {MAX_DRAWS} draws")

    def read(self, reply: str) -> str | None:
        """What stands in the one answer tag."""
        return tagged_answer(reply, MAX_ANSWER)

    def score(self, answer: str) -> float:
        """1 for the full score of the task's own scorer, else 0.

        Raises:
            CheckError: There is no score.
        """
        return float(self._right(answer, self._entry))

    def close(self) -> None:
        """Let go of the processes, which end with the last environment that needs them."""
        self._pool = None

    def _generated(self, seed: int) -> dict[str, Any]:
        # Some tasks draw from the global generators, and decimal_arithmetic sets the precision of the whole thread.
        with OwnRandom(seed).use(), localcontext():
            entry: dict[str, Any] = self._library.create_dataset(self.task, seed=seed, size=1, **self.config)[0]
        return entry

    def _right(self, answer: str, entry: dict[str, Any]) -> bool:
        assert self._pool is not None, "the environment is closed"
        return self._pool.check(str(entry["answer"]), answer, self.task, self.config, entry)

    def _asked_elsewhere(self, seed: int, entry: dict[str, Any]) -> bool:
        """Whether the seed has the same question in another process."""
        assert self._pool is not None, "the environment is closed"
        return self._pool.check(str(seed), str(entry["question"]), self.task, self.config, {})

    def _require_sound(self) -> None:
        """Try the generator and the scorer of the task on some questions.

        Raises:
            ValueError: Questions depend on more than the seed, or scores cannot be those of right answers.
        """
        try:
            entries = [self._generated(seed) for seed in range(PROBES)]
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"task={self.task!r} with config={self.config}: {error}") from error
        module = importlib.import_module("reasoning_gym.factory").DATASETS[self.task][0].__module__
        if module.partition(".")[0] != "reasoning_gym":
            raise ValueError(
                f"task={self.task!r} must be one of reasoning-gym's own, not of {module}: the process that scores"
                " answers does not know others"
            )
        if not all(self._asked_elsewhere(seed, entry) for seed, entry in enumerate(entries)):
            raise ValueError(
                f"task={self.task!r} has other questions in every process, since reasoning-gym draws them by the hashes"
                " of strings: set the environment variable PYTHONHASHSEED, to the same number in all runs"
            )
        unsound = f"task={self.task!r} cannot be learned: its scorer in reasoning-gym"
        for answer in (NONSENSE, *CONSTANTS):
            taken = {str(entry["answer"]).casefold() for entry in entries if self._right(answer, entry)}
            if len(taken) > (answer != NONSENSE):
                raise ValueError(
                    f"{unsound} takes {answer!r} for right where the answer is {' or '.join(sorted(taken))}"
                )
        answered = [entry for entry in entries if entry["answer"] is not None]
        if answered and not any(self._right(str(entry["answer"]), entry) for entry in answered):
            raise ValueError(f"{unsound} refuses the task's own answers")


_SOUND: set[str] = set()
"""Tasks with their settings that this process has tried."""
