"""The clock: what the age of a stored trajectory is measured in."""

import math
from typing import Literal, get_args

from freshper_lightning.trajectory import ClockReading

ClockName = Literal["updates", "iterations", "lr_path", "drift", "drift_length"]
"""The units that an age can be counted in."""

CLOCKS: tuple[str, ...] = get_args(ClockName)

DRIFT_CLOCKS: tuple[ClockName, ...] = ("drift", "drift_length")
"""Clocks that stand still unless somebody measures the drift of the policy."""


def clock_value(reading: ClockReading, clock: ClockName) -> float:
    """The reading in the unit named by ``clock``.

    Raises:
        ValueError: ``clock`` is not one of the known units, or the reading is not finite.
    """
    if clock not in CLOCKS:
        raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, not {clock!r}")
    value: float = getattr(reading, "iteration" if clock == "iterations" else clock)
    if not math.isfinite(value):
        raise ValueError(f"the reading of the clock ({clock}) must be finite, not {value!r}")
    return value
