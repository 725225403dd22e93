"""The results of a study as a picture: gradients, effective sample sizes and variances over age."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from freshper_lightning.algorithms.ratios import LEVELS
from freshper_lightning.study.report import Run, curve, losses, runs
from freshper_lightning.study.table import Row

STYLES = ("-", "--", ":", "-.")
"""Of seeds, in turn."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """One line of panels per task; seeds are line styles."""
    tasks = list(dict.fromkeys(task for task, _ in runs(rows)))
    size = (17, 5.2 * len(tasks))
    figure, grid = pyplot.subplots(len(tasks), 3, figsize=size, layout="constrained", squeeze=False)
    for axes, task in zip(grid, tasks, strict=True):
        of_task = [run for run in runs(rows) if run[0] == task]
        _gradients(axes[0], rows, of_task)
        _sizes(axes[1], rows, of_task)
        _variances(axes[2], rows, of_task)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _gradients(axes: Axes, rows: Sequence[Row], of_task: list[Run]) -> None:
    colors = pyplot.get_cmap("tab20")
    for run, style in zip(of_task, cycle(STYLES), strict=False):
        _line(
            axes, curve(rows, run, "ceiling"), "ceiling" if run == of_task[0] else None, "black", style, interval=False
        )
        for index, loss in enumerate(losses(rows)):
            label = loss if run == of_task[0] else None
            # One interval stands for all: they are alike, and thirteen on top of one another hide every line.
            _line(axes, curve(rows, run, "cosine", loss), label, colors(index), style, interval=not index)
    axes.set(title=f"{of_task[0][0]}\ncosine to the fresh gradient; shaded: interval of the first loss")
    axes.set(ylabel="cosine", ylim=(-1, 1))
    _tick(axes, _ages(rows, of_task))
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _sizes(axes: Axes, rows: Sequence[Row], of_task: list[Run]) -> None:
    for run, style in zip(of_task, cycle(STYLES), strict=False):
        for index, level in enumerate(LEVELS):
            label = f"{level}, plug-in" if run == of_task[0] else None
            _line(axes, curve(rows, run, f"ess_{level}"), label, f"C{index}", style, marker="o")
            label = f"{level}, exp(-variance)" if run == of_task[0] else None
            _line(axes, curve(rows, run, f"gaussian_ess_{level}"), label, f"C{index}", style, marker="x")
    axes.set(title="effective sample size over n", ylabel="ESS / n", ylim=(0, 1.02))
    _tick(axes, _ages(rows, of_task))
    _legend(axes, loc="lower left")


def _variances(axes: Axes, rows: Sequence[Row], of_task: list[Run]) -> None:
    ages = set[int]()
    for run, style in zip(of_task, cycle(STYLES), strict=False):
        for index, level in enumerate(LEVELS):
            found = {age: row for age, row in curve(rows, run, f"variance_{level}").items() if age > 0}
            ages |= found.keys()
            _line(axes, found, level if run == of_task[0] else None, f"C{index}", style, marker="o")
            if found and run == of_task[0]:
                first = min(found)
                for power, shade in ((1, "0.7"), (2, "0.85")):
                    guide = [found[first].value * (age / first) ** power for age in found]
                    axes.plot(list(found), guide, color=shade, linewidth=1, zorder=0)
    axes.set(title="variance of the log-ratio\ngrey: slopes of 1 and 2")
    if ages:  # without a value above 0 there is no such scale
        axes.set(xscale="log", yscale="log")
        _tick(axes, sorted(ages))
        _legend(axes)


def _ages(rows: Sequence[Row], of_task: list[Run]) -> list[int]:
    return sorted({row.age for row in rows if (row.task, row.seed) in of_task})


def _legend(axes: Axes, **place: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, **place)


def _tick(axes: Axes, ages: Sequence[int]) -> None:
    """Those ages that were measured, and no others."""
    axes.set_xticks(ages, [str(age) for age in ages])
    axes.minorticks_off()


def _line(
    axes: Axes,
    found: dict[int, Row],
    label: str | None,
    color: object,
    style: str,
    marker: str = "",
    interval: bool = True,
) -> None:
    if not found:
        return
    values = [row.value for row in found.values()]
    axes.plot(list(found), values, label=label, color=color, linestyle=style, marker=marker, markersize=4)
    if interval:
        ends = ([row.low for row in found.values()], [row.high for row in found.values()])
        axes.fill_between(list(found), *ends, color=color, alpha=0.08, linewidth=0)
    axes.set_xscale("symlog", linthresh=6)
    axes.set(xlabel="age in updates")
    axes.grid(alpha=0.3)
