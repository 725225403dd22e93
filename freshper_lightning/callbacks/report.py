"""What a run came to: a table on the terminal and a learning curve as a picture."""

import math
from pathlib import Path

import matplotlib
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import LAST

matplotlib.use("Agg")
from matplotlib import pyplot

SUCCESS = "evaluation/{mode}/success"
RETURN = "evaluation/{mode}/return"
STEPS = "evaluation/environment_steps"


class Report(Callback):
    """Reports what the logs and the other callbacks hold; measures nothing itself."""

    def __init__(self, enabled: bool = True) -> None:
        """Keep the setting.

        Args:
            enabled: Whether to print the table and draw the curve when fit ends.
        """
        self.enabled = enabled

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table; draw the curve where there are TensorBoard logs."""
        if not self.enabled or not trainer.is_global_zero:
            return
        scalars = read_scalars(trainer.log_dir) if trainer.log_dir else {}
        rows = [*_success(trainer), *_training(trainer, scalars), *_places(trainer)]
        if trainer.log_dir and _curves(scalars):
            picture = Path(trainer.log_dir) / "learning_curve.png"
            draw_learning_curve(scalars, picture)
            rows.append(("learning curve", str(picture)))
        width = max(len(name) for name, _ in rows)
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows), flush=True)


def _success(trainer: Trainer) -> list[tuple[str, str]]:
    evaluation = callback_of(trainer, EvaluationCallback)
    first, latest = evaluation.first, evaluation.latest
    rows = []
    for mode in evaluation.modes:
        success, score = SUCCESS.format(mode=mode), RETURN.format(mode=mode)
        before, after = (_with_interval(m.get(success), evaluation.episodes) for m in (first, latest))
        rows.append((f"success, {mode}", f"{before} before, {after} after ({evaluation.episodes} held-out episodes)"))
        if latest.get(score) != latest.get(success):
            before, after = (f"{m[score]:.3f}" if score in m else "-" for m in (first, latest))
            rows.append((f"return, {mode}", f"{before} before, {after} after"))
    return rows


def _with_interval(share: float | None, episodes: int) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.1f} % ± {196 * math.sqrt(share * (1 - share) / episodes):.1f}"


def _training(trainer: Trainer, scalars: dict[str, list[tuple[int, float]]]) -> list[tuple[str, str]]:
    rollout = callback_of(trainer, RolloutCallback)
    rows = [("optimizer steps", str(rollout.clock.updates))]
    if rollout.environment_steps:
        rows.append(("environment steps", str(rollout.environment_steps)))
    monitor = callback_of(trainer, ReplayMonitor)
    if monitor.trained["replay"]:
        share = monitor.trained["replay"] / sum(monitor.trained.values())
        rows.append(("replayed data", f"{100 * share:.1f} % of the trajectories trained on"))
    for level in ("token", "sequence"):
        points = scalars.get(f"update/replay/ess_{level}", [])
        if points:
            rows.append((f"ESS / n, {level}", f"{points[-1][1]:.3f} of the last iteration's replay batches"))
    return rows


def _places(trainer: Trainer) -> list[tuple[str, str]]:
    rows = [("logs", f"tensorboard --logdir {trainer.log_dir}")] if trainer.log_dir else []
    checkpoint = trainer.checkpoint_callback
    path = Path(checkpoint.dirpath or ".") / LAST if isinstance(checkpoint, ModelCheckpoint) else None
    return [*rows, ("checkpoint", str(path))] if path is not None and path.exists() else rows


def read_scalars(log_dir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar in the TensorBoard files of a folder: (step, value) by tag; of a step written twice, the newer."""
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: sorted({event.step: event.value for event in events.Scalars(tag)}.items())
        for tag in events.Tags()["scalars"]
    }


def _curves(scalars: dict[str, list[tuple[int, float]]]) -> list[str]:
    return [mode for mode in ("sampled", "greedy") if len(scalars.get(SUCCESS.format(mode=mode), [])) > 1]


def draw_learning_curve(scalars: dict[str, list[tuple[int, float]]], path: str | Path) -> None:
    """Held-out success over environment steps, with the success of the training rollouts behind it, as a PNG."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps_at = dict(scalars[STEPS])
    rollouts = [(dict(scalars["rollout/environment_steps"]).get(s), v) for s, v in scalars.get("rollout/success", [])]
    if rollouts:
        axes.plot(*zip(*rollouts, strict=True), color="0.8", linewidth=1, label="training rollouts")
    for mode in _curves(scalars):
        points = [(steps_at[step], value) for step, value in scalars[SUCCESS.format(mode=mode)]]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"held-out, {mode}")
    axes.set(xlabel="environment steps", ylabel="success", ylim=(0, 1), title="Success on instances never trained on")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
