"""What a caller must keep to, said in the caller's terms."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from freshper_lightning.replay.columns import Floats


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Does nothing if the condition holds.

    Raises:
        ValueError: It does not; the message has name, value and what is allowed.
    """
    if not condition:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Does nothing if the value is allowed; see :func:`require`."""
    require(value in allowed, name, value, f"one of {', '.join(allowed)}")


def require_bounds(capacity: int, max_bytes: int | None, alpha: float, seed: int) -> None:
    """Does nothing if the numbers of a replay buffer are possible; see :func:`require`."""
    require(capacity >= 1, "capacity", capacity, "at least 1")
    require(max_bytes is None or max_bytes >= 1, "max_bytes", max_bytes, "at least 1, or none for no limit")
    require(0 <= alpha <= 1, "alpha", alpha, "in [0, 1]")
    require(seed >= 0, "seed", seed, "at least 0")


def measured(values: ArrayLike, count: int | None) -> Floats:
    """Base priorities as float64 [n].

    Raises:
        ValueError: One is not finite or below 0, or there are not ``count`` of them.
    """
    base = np.asarray(values, np.float64)
    wrong = base[~(np.isfinite(base) & (base >= 0))]
    require(len(wrong) == 0, "priority", wrong[:1].tolist(), "finite and at least 0")
    require(count is None or base.shape == (count,), "shape of priorities", base.shape, f"({count},)")
    return base
