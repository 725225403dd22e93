"""Results with intervals, and learning curves: of all arms together, and of each beside the baseline."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from freshper_lightning.compare.curves import AXES, Curve, Floats
from freshper_lightning.compare.measures import Outcome
from freshper_lightning.compare.statistics import interquartile_mean, intervals

matplotlib.use("Agg")
from matplotlib import pyplot

PLACES = 60
"""Points at which curves of different runs are averaged."""
COLUMNS = 4
CLEAR, CROWDED = 0.15, 0.05
"""Opacity of intervals, of few arms and of more than a row of :func:`draw_arms`."""


def draw_outcomes(outcomes: Mapping[str, Outcome], baseline: str, label: str, path: Path) -> None:
    """One line for each arm: interquartile mean, interval, and a dot for each seed, beside the baseline's mean."""
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.32 * len(outcomes)), layout="constrained")
    for row, (arm, outcome) in enumerate(outcomes.items()):
        found, colour = outcome.estimate, "black" if arm == baseline else "C0"
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [row, row], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot([found.value], [row], "|", color=colour, markersize=14, markeredgewidth=2.5)
        axes.plot(list(outcome.by_seed.values()), [row] * len(outcome.by_seed), ".", color=colour, markersize=5)
    if baseline in outcomes:
        axes.axvline(outcomes[baseline].estimate.value, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(outcomes)), list(outcomes))
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_curves(curves: Sequence[Curve], baseline: str, label: str, path: Path) -> None:
    """Interquartile mean of every arm with its interval, over each axis."""
    figure, panels = pyplot.subplots(1, len(AXES), figsize=(15, 5), sharey=True, layout="constrained")
    arms = list(dict.fromkeys(curve.arm for curve in curves))
    colours = pyplot.get_cmap("tab10" if len(arms) <= 10 else "tab20")(np.arange(len(arms)) % 20)
    opacity = CLEAR if len(arms) <= COLUMNS else CROWDED
    for axes, (axis, name) in zip(panels, AXES.items(), strict=True):
        for arm, colour in zip(arms, colours, strict=True):
            style = {"color": "black", "linewidth": 2} if arm == baseline else {"color": colour}
            _draw([curve for curve in curves if curve.arm == arm], axis, axes, opacity, label=arm, **style)
        axes.set_xlabel(name)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_arms(curves: Sequence[Curve], baseline: str, label: str, path: Path) -> None:
    """One panel for each arm, over environment steps, with the baseline in grey behind it."""
    arms = list(dict.fromkeys(curve.arm for curve in curves))
    rows = -(-len(arms) // COLUMNS)
    size = (3.6 * COLUMNS, 0.8 + 2.8 * rows)
    figure, panels = pyplot.subplots(
        rows, COLUMNS, sharex=True, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axes, arm in zip(panels.flat, arms, strict=False):
        _draw([curve for curve in curves if curve.arm == baseline], "environment_steps", axes, CLEAR, color="0.6")
        if arm != baseline:
            _draw([curve for curve in curves if curve.arm == arm], "environment_steps", axes, CLEAR, color="C0")
        axes.set_title(arm, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels.flat[len(arms) :]:
        axes.set_visible(False)
    figure.supxlabel(AXES["environment_steps"])
    figure.supylabel(f"{label} (grey: {baseline})")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(curves: Sequence[Curve], axis: str, axes: Any, opacity: float, **style: Any) -> None:
    if not curves:
        return
    places, values = on_common_places(curves, axis)
    if not len(places):
        return
    low, high = intervals(values)
    (line,) = axes.plot(places, interquartile_mean(values, axis=0), **style)
    axes.fill_between(places, low, high, color=line.get_color(), alpha=opacity, linewidth=0)


def on_common_places(curves: Sequence[Curve], axis: str) -> tuple[Floats, Floats]:
    """Places [PLACES] that every run passes, and the runs' values there, [runs, PLACES]; no places where none does."""
    starts, ends = ([float(getattr(curve, axis)[end]) for curve in curves] for end in (0, -1))
    places = np.linspace(max(starts), min(ends), PLACES) if max(starts) <= min(ends) else np.empty(0)
    return places, np.stack([curve.at(axis, places) for curve in curves])
