"""What each run of each arm comes to, and what that says about the arms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshper_lightning.compare.curves import Curve
from freshper_lightning.compare.settings import Comparison
from freshper_lightning.compare.statistics import Difference, Estimate, estimate, paired

FINAL, AREA, STEPS, DROP = "final-window mean", "area under the curve", "steps to the threshold", "drop from the peak"
MEASURES = (FINAL, AREA, STEPS, DROP)


@dataclass(frozen=True)
class Outcome:
    """One measure of one arm."""

    by_seed: dict[int, float]
    evaluation: dict[int, int | None] = field(default_factory=dict)
    """Of steps to the threshold, by seed: which evaluation they are those of, None where the run is censored: it did
    not get there within the horizon, which is its value, and the true one is above it."""

    @property
    def censored(self) -> int:
        """How many runs are."""
        return sum(place is None for place in self.evaluation.values())

    @property
    def estimate(self) -> Estimate:
        """Over seeds."""
        return estimate(np.array(list(self.by_seed.values())))

    def less(self, baseline: "Outcome") -> Difference | None:
        """Paired by seed; None where no seed is in both.

        Two runs that got to the threshold at the same evaluation are a tie: their steps differ in how long episodes
        were, and which one was there first is not known.
        """
        mine, theirs = self.evaluation, baseline.evaluation
        alike = [seed for seed in mine.keys() & theirs.keys() if mine[seed] == theirs[seed]]
        return paired(self.by_seed, baseline.by_seed, alike)


@dataclass(frozen=True)
class Measures:
    """Everything that the report says in numbers, by measure and arm."""

    threshold: float | None
    """None where the baseline has no result above 0, of which a share would mean something."""
    start: float
    """Mean of the runs' first values; where it is above the threshold, steps to it say nothing."""
    horizon: float
    """Environment steps that areas and the way to the threshold go to: the fewest that a run ended with."""
    shortest: str
    """Which run that is, in words."""
    outcomes: dict[str, dict[str, Outcome]]


def measure(curves: Sequence[Curve], comparison: Comparison) -> Measures:
    """Of all runs in a table; the threshold depends on the baseline's runs and on nothing else."""
    window = comparison.final_window
    threshold = _threshold([c for c in curves if c.arm == comparison.baseline], comparison)
    shortest = min(curves, key=lambda curve: float(curve.environment_steps[-1]))
    horizon = float(shortest.environment_steps[-1])
    arms = dict.fromkeys(curve.arm for curve in curves)
    outcomes = {
        FINAL: {arm: _outcome(curves, arm, lambda curve: curve.final(window)) for arm in arms},
        AREA: {arm: _outcome(curves, arm, lambda curve: curve.area(horizon)) for arm in arms},
        DROP: {arm: _outcome(curves, arm, lambda curve: curve.drop(window)) for arm in arms},
    }
    if threshold is not None:
        outcomes[STEPS] = {arm: _steps([c for c in curves if c.arm == arm], threshold, horizon) for arm in arms}
    start = float(np.mean([curve.values[0] for curve in curves]))
    return Measures(threshold, start, horizon, f"{shortest.arm}, seed {shortest.seed}", outcomes)


def _threshold(baseline: Sequence[Curve], comparison: Comparison) -> float | None:
    if not baseline:
        return None
    mean = estimate(np.array([curve.final(comparison.final_window) for curve in baseline])).value
    return comparison.threshold * mean if mean > 0 else None


def _outcome(curves: Sequence[Curve], arm: str, value: Callable[[Curve], float]) -> Outcome:
    return Outcome({curve.seed: value(curve) for curve in curves if curve.arm == arm})


def _steps(curves: Sequence[Curve], threshold: float, horizon: float) -> Outcome:
    """All runs are followed equally long, so that two that did not get there are equal."""
    steps: dict[int, float] = {}
    places: dict[int, int | None] = {}
    for curve in curves:
        place = curve.reached(threshold)
        if place is not None and curve.environment_steps[place] > horizon:
            place = None
        steps[curve.seed] = horizon if place is None else float(curve.environment_steps[place])
        places[curve.seed] = place
    return Outcome(steps, places)
