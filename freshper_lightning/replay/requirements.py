"""What a caller must keep to, said in the caller's terms."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


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


def require_whole_number(name: str, value: object, least: int) -> None:
    """Does nothing if the value is an integer of at least ``least``; see :func:`require`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    require(bool(value >= least), name, value, f"at least {least}")


def ids_of(ids: ArrayLike) -> NDArray[np.int64]:
    """Ids as int64 [n].

    Raises:
        ValueError: They are not integers, or not in one sequence.
    """
    found = np.asarray(ids)
    whole = found.dtype.kind in "iu" or found.size == 0
    require(found.ndim == 1 and whole, "ids", ids, "integers in one sequence")
    return found.astype(np.int64, copy=False)


def numbers_of(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Numbers as float64 [n].

    Raises:
        ValueError: They are not in one sequence.
    """
    found = np.asarray(values, np.float64)
    require(found.ndim == 1, name, values, "numbers in one sequence")
    return found


def measured(values: ArrayLike, count: int | None) -> NDArray[np.float64]:
    """Base priorities as float64 [n].

    Raises:
        ValueError: One is not finite or below 0, or there are not ``count`` of them.
    """
    base = numbers_of("priorities", values)
    wrong = base[~(np.isfinite(base) & (base >= 0))]
    require(len(wrong) == 0, "priority", wrong[:1].tolist(), "finite and at least 0")
    require(count is None or base.shape == (count,), "shape of priorities", base.shape, f"({count},)")
    return base
