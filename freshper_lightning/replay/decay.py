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
    """Whether ``factor(a + b) = factor(a) factor(b)``, so that an age common to all entries cancels."""

    @abstractmethod
    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """Natural logarithm of the freshness at each age [N], in units of the clock; at most 0, ``-inf`` for none."""


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
class NoDecay(Decay):
    """Freshness 1 at every age: standard prioritized replay."""

    factorises: ClassVar[bool] = True

    def log_factor(self, age: NDArray[np.float64]) -> NDArray[np.float64]:
        """Zeros."""
        return np.zeros_like(age)
