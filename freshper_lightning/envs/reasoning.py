"""The procedural tasks of reasoning-gym, one question per episode."""

import importlib
import zlib
from typing import Any

from freshper_lightning.envs.question import QuestionEnv, tagged_answer

MAX_QUESTION, MAX_ANSWER = 20_000, 4096
"""Characters; some tasks ask for whole grids."""
MAX_DRAWS = 1000

INSTRUCTION = "Answer the question. Think first, then give the answer alone in <answer>...</answer>."


class ReasoningGym(QuestionEnv):
    """A question of one task of reasoning-gym, scored by the task; only its full score, 1, counts.

    Many of its scorers give a share to an answer that merely contains the right one, so a smaller score is 0 here. The
    question depends on the seed of ``reset`` alone, and an even seed never gives a question of an odd one: training and
    held-out seeds differ in parity. Needs the extra ``reasoning-gym``.

    Args:
        task: Name of the data set in reasoning-gym, such as ``chain_sum``.
        config: Its settings.
        attempts: Replies per question, at least 1.

    Raises:
        ValueError: reasoning-gym is not installed, or refuses ``task`` or ``config``.
    """

    def __init__(self, task: str, config: dict[str, Any] | None = None, attempts: int = 1) -> None:
        self.task, self.config = task, config or {}
        self._library = _library()
        try:
            self._generated(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"task={task!r} with config={self.config}: {error}") from error
        self._data: Any = None
        self._entry: dict[str, Any] = {}
        super().__init__(INSTRUCTION, attempts, MAX_QUESTION)

    def draw(self, seed: int | None) -> str:
        """The first question of the parity of ``seed``, of those that the generator gives.

        Raises:
            RuntimeError: The task has no such question among many.
        """
        for _ in range(MAX_DRAWS):
            self._data, self._entry = self._generated(int(self.np_random.integers(2**31)))
            question = str(self._entry["question"])
            if seed is None or zlib.crc32(question.encode()) % 2 == seed % 2:
                return question
        raise RuntimeError(f"task {self.task!r} gave no question of parity {(seed or 0) % 2} in {MAX_DRAWS} draws")

    def read(self, reply: str) -> str | None:
        """What stands in the one answer tag."""
        return tagged_answer(reply, MAX_ANSWER)

    def score(self, answer: str) -> float:
        """1 for the full score of the task's own scorer, else 0."""
        return float(self._data.score_answer(answer, self._entry) >= 1)

    def _generated(self, seed: int) -> tuple[Any, dict[str, Any]]:
        data = self._library.create_dataset(self.task, seed=seed, size=1, **self.config)
        return data, data[0]


def _library() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ValueError(
            "this environment needs the package reasoning-gym: pip install -e '.[reasoning-gym]'"
        ) from error
