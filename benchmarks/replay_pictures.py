"""The pictures of docs/replay.md.

    python benchmarks/replay_pictures.py runs/quickstart/freshper

draws the probability over age, which comes from a buffer, and the effective sample size over age, which comes from the
TensorBoard files of the run whose folder is given.
"""

import argparse
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.replay import (
    ClockReading,
    Decay,
    ExponentialDecay,
    InverseDecay,
    NoDecay,
    ReplayBuffer,
    Trajectory,
    UniformPriority,
    WindowDecay,
)

ALPHA, AGES = 0.6, 300
DECAYS: dict[str, Decay] = {
    "tau 10": ExponentialDecay(10),
    "tau 20": ExponentialDecay(20),
    "tau 50": ExponentialDecay(50),
    "tau 100": ExponentialDecay(100),
    "tau 500": ExponentialDecay(500),
    "inverse": InverseDecay(),
    "window of 100": WindowDecay(100),
    "none": NoDecay(),
}
STYLES = {"inverse": "--", "window of 100": ":", "none": "-."}
BUCKET = re.compile(r"ess_by_age/(?P<level>token|sequence)/(?P<low>\d+)-(?P<high>\d+|inf)")


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder with the TensorBoard files of a run")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="where the pictures go")
    options = parser.parse_args()
    draw_probabilities(options.folder / "replay_probability.png")
    draw_ess(options.run, options.folder / "replay_ess.png")


def probabilities(decay: Decay) -> NDArray[np.float64]:
    """float64 [AGES + 1]: probability of a draw by age, in a buffer of one trajectory of each age, equal otherwise."""
    buffer = ReplayBuffer(AGES + 1, UniformPriority(), decay, alpha=ALPHA, asynchronous=False)
    for update in range(AGES + 1):
        buffer.add([_trajectory(update)], ClockReading(updates=update))
    return buffer.probabilities(ClockReading(updates=AGES))[::-1]


def _trajectory(update: int) -> Trajectory:
    return Trajectory(
        token_ids=torch.zeros(2, dtype=torch.int32),
        turns=torch.tensor([[1, 2]], dtype=torch.int32),
        behavior_log_probs=torch.zeros(1),
        rewards=torch.zeros(1),
        weight_versions=torch.tensor([update]),
        born=ClockReading(updates=update),
        group=update,
        member=0,
        seed=0,
        task="none",
    )


def draw_probabilities(path: Path) -> None:
    """Probability over age, by decay."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, decay in DECAYS.items():
        shares = probabilities(decay)
        axes.plot(np.where(shares > 0, shares, np.nan), STYLES.get(name, "-"), label=name)
    axes.set(xlabel="age, updates", ylabel="probability of one draw", yscale="log", ylim=(1e-6, 0.2), xlim=(0, AGES))
    axes.set_title(f"One trajectory of each age from 0 to {AGES}, equal base priorities, alpha {ALPHA}", fontsize=10)
    _finish(figure, axes, path)


def draw_ess(run: Path, path: Path) -> None:
    """Effective sample size over age: every iteration, and the median with quartiles of each range of ages."""
    scalars = read_scalars(run)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for level, color, label in (("token", "C0", "tokens"), ("sequence", "C1", "trajectories")):
        found = _by_age(scalars, level)
        _draw_level(axes, list(found.values()), color, label)
        axes.set_xticks(range(len(found)), list(found))
    axes.set(xlabel="age, updates", ylabel="ESS / n of the behavior weights", ylim=(0, 1.05))
    axes.set_title("A dot is one iteration, early ones left; lines are medians, bars quartiles", fontsize=10)
    _finish(figure, axes, path)


def _by_age(scalars: dict[str, list[tuple[int, float]]], level: str) -> dict[str, NDArray[np.float64]]:
    """Values of all iterations by range of ages, youngest first.

    Raises:
        ValueError: The run has logged none.
    """
    tags = [match for tag in scalars if (match := BUCKET.fullmatch(tag)) and match["level"] == level]
    if not tags:
        raise ValueError(f"the run has no scalars ess_by_age/{level}")
    tags.sort(key=lambda match: int(match["low"]))
    return {_label(match): np.array([value for _, value in scalars[match[0]]]) for match in tags}


def _label(match: re.Match[str]) -> str:
    """Ages in a range, whose end is not in it."""
    low, high = match["low"], match["high"]
    if high == "inf":
        return f"{low} and more"
    last = int(high) - 1
    return low if last == int(low) else f"{low} to {last}"


def _draw_level(axes: Axes, found: list[NDArray[np.float64]], color: str, label: str) -> None:
    for place, values in enumerate(found):
        axes.plot(np.linspace(place - 0.12, place + 0.12, len(values)), values, ".", color=color, alpha=0.25)
    lower, median, upper = np.array([np.percentile(values, [25, 50, 75]) for values in found]).T
    axes.errorbar(range(len(found)), median, (median - lower, upper - median), color=color, capsize=3, label=label)


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
