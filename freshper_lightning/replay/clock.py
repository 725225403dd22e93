"""The clock: what the age of a stored trajectory is measured in."""

from typing import Literal, get_args

from freshper_lightning.trajectory import ClockReading

ClockName = Literal["updates", "iterations"]
"""The units that an age can be counted in."""

CLOCKS: tuple[str, ...] = get_args(ClockName)


def clock_value(reading: ClockReading, clock: ClockName) -> int:
    """The reading in the unit named by ``clock``.

    Raises:
        ValueError: ``clock`` is not one of the known units.
    """
    if clock == "updates":
        return reading.updates
    if clock == "iterations":
        return reading.iteration
    raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, not {clock!r}")
