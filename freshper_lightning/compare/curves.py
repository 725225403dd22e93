"""The learning curve of one run, and the numbers that it comes to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freshper_lightning.compare.collect import Row
from freshper_lightning.compare.statistics import ties
from freshper_lightning.errors import ConfigurationError

Floats = NDArray[np.float64]

AXES = {"environment_steps": "environment steps", "update": "optimizer steps", "seconds": "wall-clock seconds"}
"""What curves are drawn over, and its name."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Evaluations of one run in one mode, in order; the first is before training where there was one."""

    arm: str
    seed: int
    values: Floats
    """[n]: success or return."""
    environment_steps: Floats
    """[n], increasing."""
    update: Floats
    """[n], never decreasing."""
    seconds: Floats
    """[n], never decreasing."""

    def final(self, window: int) -> float:
        """Mean of the last ``window`` values: no peak, whose height is luck."""
        return float(self.values[-window:].mean())

    def peak(self, window: int) -> float:
        """Greatest mean of ``window`` consecutive values."""
        sums = np.convolve(self.values, np.ones(min(window, len(self.values))), mode="valid")
        return float(sums.max()) / min(window, len(self.values))

    def drop(self, window: int) -> float:
        """From the peak to the end, at least 0; both are means of ``window`` values."""
        return self.peak(window) - self.final(window)

    def area(self, horizon: float) -> float:
        """Mean height over environment steps from the first evaluation to ``horizon``, between points linear."""
        steps = self.environment_steps
        inside = steps < horizon
        x = np.append(steps[inside], horizon)
        y = np.append(self.values[inside], np.interp(horizon, steps, self.values))
        return float(np.trapezoid(y, x) / (x[-1] - x[0])) if x[-1] > x[0] else float(y[0])

    def reached(self, threshold: float) -> int | None:
        """Which evaluation was the first at the threshold; None (censored) where none was."""
        there = (self.values >= threshold) | ties(self.values, threshold)
        return int(there.argmax()) if there.any() else None

    def at(self, axis: str, places: Floats) -> Floats:
        """Values at places of an axis of ``AXES``, linear between evaluations."""
        found: Floats = np.interp(places, getattr(self, axis), self.values)
        return found


def curves_of(rows: Sequence[Row], metric: str, mode: str) -> list[Curve]:
    """One for each run in the table, in its order.

    Raises:
        ConfigurationError: The table has no such evaluations, or the environment gives no verdict of success.
    """
    of_mode = [row for row in rows if row.mode == mode]
    if not of_mode:
        raise ConfigurationError(f"the table has no evaluations of mode={mode}")
    if metric == "success" and any(row.success is None for row in of_mode):
        raise ConfigurationError("metric=success must be return: this environment gives no verdict of success")
    runs = list(dict.fromkeys((row.arm, row.seed) for row in of_mode))
    return [_curve([row for row in of_mode if (row.arm, row.seed) == run], metric) for run in runs]


def _curve(rows: list[Row], metric: str) -> Curve:
    ordered = sorted(rows, key=lambda row: row.iteration)
    values = [row.success if metric == "success" else row.score for row in ordered]
    axes = {axis: np.array([getattr(row, axis) for row in ordered], np.float64) for axis in AXES}
    return Curve(ordered[0].arm, ordered[0].seed, np.array(values, np.float64), **axes)
