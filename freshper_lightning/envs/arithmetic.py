"""Sums and differences of small numbers, worked out step by step: a task for the tiniest of policies."""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from freshper_lightning.envs.protocol import spoken
from freshper_lightning.envs.question import QuestionEnv

ISOLATE = r"\d| [-+=] "
"""What a tokenizer should keep in tokens of their own: digits, and operators with the blanks around them."""

INSTRUCTION = (
    "Work out the result from left to right, one step per line, like 3 + 4 = 7.\n"
    "End with the result as <answer>number</answer>."
)

MAX_DRAWS = 1000

_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Calculation:
    """A sum of signed numbers, taken from left to right; at least two, none of them 0, the first positive."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        """As the policy is asked: ``7 + 12 - 5``."""
        first, *rest = self.numbers
        return f"{first}{''.join(_signed(number) for number in rest)}"

    def totals(self) -> list[int]:
        """Intermediate results, the last of them the result."""
        return [int(total) for total in np.cumsum(self.numbers)[1:]]

    def parity(self) -> int:
        """0 or 1, by a hash: calculations of different parity are never the same."""
        return zlib.crc32(str(self).encode()) & 1


def _signed(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}"


def draw_calculation(terms: int, largest: int, rng: np.random.Generator, parity: int | None = None) -> Calculation:
    """Draw ``terms`` numbers from 1 to ``largest`` and, except for the first, their signs, all uniformly.

    With a ``parity``, calculations of the other one are drawn again.

    Raises:
        ValueError: None of that parity came; the numbers are too few.
    """
    for _ in range(MAX_DRAWS):
        signs = np.concatenate([[1], rng.choice([-1, 1], size=terms - 1)])
        calculation = Calculation(tuple(int(number) for number in signs * rng.integers(1, largest + 1, size=terms)))
        if parity in (None, calculation.parity()):
            return calculation
    raise ValueError(
        f"terms={terms}, largest={largest} must be larger: of so few calculations none is for "
        f"{'training' if parity == 0 else 'evaluation'}"
    )


class Arithmetic(QuestionEnv):
    """A sum of signed integers; score 1 for its value in the one answer tag, and 0 for everything else.

    Only the answer is scored, not the steps. The calculation depends on the seed of ``reset`` alone, and an even seed
    never gives the calculation of an odd one: they are few, and training and held-out seeds differ in parity.

    Args:
        terms: Numbers per calculation, at least 2.
        largest: Largest number, at least 2.
        attempts: Replies per calculation, at least 1.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    def __init__(self, terms: int = 3, largest: int = 9, attempts: int = 1) -> None:
        if terms < 2:
            raise ValueError(f"terms must be at least 2, not {terms}")
        if not 2 <= largest <= 10**6:
            raise ValueError(f"largest must be in [2, 1000000], not {largest}")
        for parity in (0, 1):
            draw_calculation(terms, largest, np.random.default_rng(0), parity)
        self.terms, self.largest = terms, largest
        self.calculation: Calculation
        super().__init__(INSTRUCTION, attempts, longest=terms * (len(str(largest)) + 3))

    def draw(self, seed: int | None) -> str:
        """The calculation that the generator and the parity of ``seed`` determine."""
        parity = None if seed is None else seed % 2
        self.calculation = draw_calculation(self.terms, self.largest, self.np_random, parity)
        return str(self.calculation)

    def read(self, reply: str) -> str | None:
        """The integer in the one answer tag of ``reply``."""
        answer = super().read(reply)
        return answer if answer is not None and _INTEGER.fullmatch(answer) else None

    def score(self, answer: str) -> float:
        """1 for the result, 0 for another number."""
        return float(int(answer) == self.calculation.totals()[-1])


def demonstrate(seed: int, noise: float, **kwargs: Any) -> list[tuple[str, str]]:
    """One calculation worked out imperfectly: the user message and the reply of its only turn.

    With probability ``noise`` a step is off by 1 or 10, up or down, and the steps after it go on from there. ``kwargs``
    are those of :class:`Arithmetic`; a single attempt is shown.

    Raises:
        ValueError: ``noise`` is not in [0, 1].
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be in [0, 1], not {noise}")
    env = Arithmetic(**kwargs)
    rng = np.random.default_rng([seed, 1])
    observation, _ = env.reset(seed=seed)
    return [(observation, _worked(env.calculation, noise, rng))]


def _worked(calculation: Calculation, noise: float, rng: np.random.Generator) -> str:
    numbers = calculation.numbers
    running = [numbers[0]]
    for number in numbers[1:]:
        slip = int(rng.choice([-10, -1, 1, 10])) if rng.random() < noise else 0
        running.append(running[-1] + number + slip)
    steps = [
        f"{before}{_signed(number)} = {after}\n"
        for number, (before, after) in zip(numbers[1:], pairwise(running), strict=True)
    ]
    return f"{''.join(steps)}<answer>{running[-1]}</answer>"


def corpus(n: int, seed: int, **kwargs: Any) -> Iterator[str]:
    """Everything said in ``n`` demonstrations, for training a tokenizer."""
    return spoken(turn for episode in range(seed, seed + n) for turn in demonstrate(episode, 0.5, **kwargs))
