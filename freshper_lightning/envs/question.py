"""One question and a bounded number of attempts at it: what the tasks with an answer to find have in common."""

import string
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from freshper_lightning.envs.protocol import ReplySpace, tagged_answer

MAX_ANSWER = 256
"""Characters of the longest text that is taken for an answer; a page that mentions the answer is none."""


class QuestionEnv(gymnasium.Env[str, str]):
    """A question, and up to ``attempts`` replies of which the last is scored; earlier ones earn nothing.

    So the return never exceeds 1, and failing first never pays. The episode ends with the first answer of score 1,
    which is its success, or with the last attempt. After any other the user message says whether there was an answer
    and how many attempts are left, and never what the answer is.

    A subclass draws the question and scores an answer.

    Args:
        instruction: Stands above every question.
        attempts: Replies per question, at least 1.
        longest: Characters of the longest question.
        charset: Characters of the questions, printable ASCII aside.

    Raises:
        ValueError: ``attempts`` is below 1.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium declares it as an instance variable)

    def __init__(self, instruction: str, attempts: int, longest: int, charset: Iterable[str] = ()) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self.instruction = instruction if attempts == 1 else f"{instruction}\nYou have {attempts} attempts."
        self.attempts, self.attempts_left = attempts, 0
        allowed = frozenset(string.printable) | frozenset(charset)
        self.observation_space = Text(len(self.instruction) + 128 + longest, charset=allowed)
        self.action_space = ReplySpace()

    @abstractmethod
    def draw(self, seed: int | None) -> str:
        """Choose the question by ``np_random``, which has just been seeded with ``seed``, and return its text."""

    def read(self, reply: str) -> str | None:
        """The answer that ``reply`` gives in the form asked for; nothing where there is none."""
        return tagged_answer(reply, MAX_ANSWER)

    @abstractmethod
    def score(self, answer: str) -> float:
        """What ``answer`` is worth, in [0, 1]; only the right one is worth 1."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the question that ``seed`` determines and return it below the instruction."""
        super().reset(seed=seed)
        text = self.draw(seed)
        self.attempts_left = self.attempts
        return f"{self.instruction}\n\n{text}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge one attempt.

        Raises:
            gymnasium.error.ResetNeeded: No attempt is left, or the question has been answered.
        """
        if self.attempts_left <= 0:
            raise gymnasium.error.ResetNeeded("the question has been answered; call reset")
        answer = self.read(action)
        score = 0.0 if answer is None else self.score(answer)
        success = score == 1
        self.attempts_left = 0 if success else self.attempts_left - 1
        over = self.attempts_left <= 0
        reward = score if over else 0.0
        info = {"valid": answer is not None, "success": success}
        return self._feedback(reward, info["valid"]), reward, over, False, info

    def _feedback(self, reward: float, valid: bool) -> str:
        if self.attempts_left <= 0:
            return f"Reward: {reward:g}"
        verdict = "That is not right." if valid else "There was no answer in the form asked for."
        return f"Reward: {reward:g}\n{verdict} Attempts left: {self.attempts_left}"
