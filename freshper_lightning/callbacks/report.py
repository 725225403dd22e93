"""What a run came to: a table on the terminal and a learning curve as a picture."""

import math
from pathlib import Path

import matplotlib
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from freshper_lightning.callbacks.evaluation import STEPS, EvaluationCallback
from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import LAST

matplotlib.use("Agg")
from matplotlib import pyplot

SUCCESS = "evaluation/{mode}/success"
RETURN = "evaluation/{mode}/return"


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
        folder = trainer.log_dir  # a collective
        if not self.enabled or not trainer.is_global_zero:
            return
        scalars = read_scalars(folder) if folder else {}
        rows = [*_evaluation(trainer), *_training(trainer, scalars), *_logs(folder), *_checkpoint(trainer)]
        if folder and _curves(scalars):
            picture = Path(folder) / "learning_curve.png"
            draw_learning_curve(scalars, picture)
            rows.append(("learning curve", str(picture)))
        self._print(rows)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what `freshper validate` found."""
        self._print_evaluation(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what `freshper test` found."""
        self._print_evaluation(trainer)

    def _print_evaluation(self, trainer: Trainer) -> None:
        folder = trainer.log_dir  # a collective
        if self.enabled and trainer.is_global_zero:
            self._print([*_evaluation(trainer), *_logs(folder)])

    def _print(self, rows: list[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows), flush=True)


def _evaluation(trainer: Trainer) -> list[tuple[str, str]]:
    evaluation = callback_of(trainer, EvaluationCallback)
    moments = [moment for moment in (evaluation.first, evaluation.latest) if moment]
    rows = []
    for mode in evaluation.modes:
        success, score = SUCCESS.format(mode=mode), RETURN.format(mode=mode)
        shares = [_with_interval(m[success], evaluation.episodes) for m in moments if success in m]
        if shares:
            rows.append((f"success, {mode}", f"{_before_after(shares)} ({evaluation.episodes} held-out episodes)"))
        returns = [m for m in moments if score in m]  # a resumed run may play modes that the one before did not
        if any(m[score] != m.get(success) for m in returns):
            rows.append((f"return, {mode}", _before_after([f"{m[score]:.3f}" for m in returns])))
    return rows


def _before_after(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} before, {values[1]} after"


def _with_interval(share: float, episodes: int) -> str:
    """Share in percent with Wilson's 95 % interval (Wilson 1927), which is right at 0 and 1 too."""
    z2 = 1.96**2
    middle = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = math.sqrt(z2 * share * (1 - share) / episodes + z2**2 / (4 * episodes**2)) / (1 + z2 / episodes)
    return f"{100 * share:.1f} % [{100 * max(middle - half, 0):.1f}, {100 * min(middle + half, 1):.1f}]"


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


def _logs(folder: str | None) -> list[tuple[str, str]]:
    return [("logs", f"tensorboard --logdir {folder}")] if folder else []


def _checkpoint(trainer: Trainer) -> list[tuple[str, str]]:
    checkpoint = trainer.checkpoint_callback
    path = Path(checkpoint.dirpath or ".") / LAST if isinstance(checkpoint, ModelCheckpoint) else None
    return [("checkpoint", str(path))] if path is not None and path.exists() else []


def read_scalars(log_dir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar in the TensorBoard files of a folder: (step, value) by tag.

    Of a step written twice it is the newer value, by the time of writing: files are read in the order of their names,
    which need not be that of their times.
    """
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: sorted({e.step: e.value for e in sorted(events.Scalars(tag), key=lambda e: e.wall_time)}.items())
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
