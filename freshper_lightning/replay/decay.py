"""Decays: how the worth of a trajectory falls with its age; pure functions of age."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


class Decay(ABC):
    """Freshness as a function of age alone: 1 at age 0 and never growing.

    A new decay is a frozen dataclass with :meth:`log_factor`. It must be pure, since a thread evaluates it too, and
    equal parameters must compare equal, since that is how a prefetched result is recognised.
    """

    factorises: ClassVar[bool] = False
    """Whether ``factor(a + b) = factor(a) factor(b)``, for ages below 0 too, so that an age common to all cancels."""

    @abstractmethod
    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """Natural logarithm of the freshness at each age [N], in units of the clock; ``-inf`` for none."""


@dataclass(frozen=True)
class ExponentialDecay(Decay):
    """``exp(-age / tau)``; the share of draws falls to 1/e after ``tau / alpha`` units of the clock.

    Source: Ma et al. 2026 (2604.16918), the freshness factor.

    Raises:
        ValueError: ``tau`` is not a finite number above 0.
    """

    factorises: ClassVar[bool] = True
    tau: float = 50.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"tau must be finite and above 0, not {self.tau}; NoDecay() keeps priorities constant")

    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """``-age / tau``."""
        with np.errstate(over="ignore"):
            return -age / self.tau


@dataclass(frozen=True)
class InverseDecay(Decay):
    """``1 / (1 + age)``: falls fast at first and never to nothing."""

    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """``-log(1 + age)``."""
        # Exact enough without log1p: the error of 1 + age is relative, and so that of its logarithm absolute.
        return -np.log(1.0 + age)


@dataclass(frozen=True)
class WindowDecay(Decay):
    """1 up to ``max_age``, and 0 beyond it: no trajectory older than that is drawn.

    Raises:
        ValueError: ``max_age`` is below 0 or not finite.
    """

    max_age: float = 100.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_age) and self.max_age >= 0):
            raise ValueError(f"max_age must be finite and at least 0, not {self.max_age}")

    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """0 inside the window, ``-inf`` outside."""
        return np.where(age <= self.max_age, 0.0, -np.inf)


@dataclass(frozen=True)
class NoDecay(Decay):
    """Freshness 1 at every age: standard prioritized replay."""

    factorises: ClassVar[bool] = True

    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """Zeros."""
        return np.zeros_like(age)


def log_freshness(decay: Decay, age: NDArray[np.float64]) -> NDArray[np.float64]:
    """``decay.log_factor(age)`` [N], once it is known to be a log freshness; ages below 0 may be fresher than fresh.

    Raises:
        ValueError: There is not one number for each age, or one is above 0; the message names the decay.
    """
    found = np.asarray(decay.log_factor(age), np.float64)
    if found.shape != age.shape:
        raise ValueError(f"log_factor of {decay!r} must return one number for each age {age.shape}, not {found.shape}")
    # One pass over the numbers, which a NaN does not pass either, where nothing is wrong.
    if found.size and not found.max() <= 0:
        wrong = np.flatnonzero(np.isnan(found) | ((found > 0) & (age >= 0)))
        if len(wrong):
            first = wrong[0]
            raise ValueError(f"log_factor of {decay!r} must be at most 0, not {found[first]} as at age {age[first]}")
    return found
