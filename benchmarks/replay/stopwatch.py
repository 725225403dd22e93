"""Times of repeated actions, up to a limit."""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np


class OverLimit(Exception):  # noqa: N818 - an outcome, not a fault
    """The action took longer than the limit, and was interrupted where it could be."""


@dataclass(frozen=True)
class Effort:
    """How often and how long is measured."""

    repetitions: int = 30
    """At most."""
    warm_up: int = 5
    """Rounds that do not count, at most."""
    budget: float = 60.0
    """Seconds after which no further round begins, three rounds apart."""
    limit: float = 10.0
    """Seconds that one action may take; one that takes longer is not tried again."""


@dataclass(slots=True)
class Stopwatch:
    """Seconds of every counted repetition by operation, and the operations that went over the limit."""

    effort: Effort
    seconds: dict[str, list[float]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    counting: bool = False

    def time(self, operation: str, action: Callable[[], object]) -> None:
        """Runs the action, unless it is known to be over the limit."""
        if operation in self.over:
            return
        try:
            with _limited(self.effort.limit):
                start = time.perf_counter()
                action()
                spent = time.perf_counter() - start
        except OverLimit:
            self.over.add(operation)
            self.seconds.pop(operation, None)
            return
        if self.counting:
            self.seconds.setdefault(operation, []).append(spent)

    def knows(self, operation: str) -> bool:
        """Whether it was measured, or went over the limit."""
        return operation in self.seconds or operation in self.over

    def rounds(self, one_round: Callable[[], None]) -> None:
        """Runs rounds of actions: a few to warm up, then up to ``repetitions`` that count, at least three."""
        effort, start = self.effort, time.perf_counter()
        with _without_collection():
            for count in range(effort.warm_up):
                if count == 0 or time.perf_counter() - start < effort.budget / 10:
                    one_round()
            self.counting, start = True, time.perf_counter()
            for count in range(effort.repetitions):
                if count < 3 or time.perf_counter() - start < effort.budget:
                    one_round()
            self.counting = False


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise OverLimit

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Like ``timeit``: garbage is collected before, and not during what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    lower, median, upper = np.percentile(values, [25, 50, 75]).tolist()
    return median, lower, upper
