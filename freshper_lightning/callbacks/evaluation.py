"""Held-out evaluation: fit, validate and test play the same instances through the same path."""

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning import Callback, LightningModule, Trainer

from datamodules.demonstrations import DemonstrationsDataModule
from freshper_lightning.callbacks.checks import chat_format, check_held_out
from freshper_lightning.callbacks.metrics import MetricBank, log_scalars
from freshper_lightning.callbacks.openings import check_openings
from freshper_lightning.callbacks.parts import callback_of, data_module, policy_module, summing
from freshper_lightning.callbacks.progress import LoopProgress
from freshper_lightning.callbacks.rollout import RolloutCallback, summarize
from freshper_lightning.rollout.collector import Collection, EnvironmentConfig
from freshper_lightning.rollout.episode import EpisodePlan
from freshper_lightning.rollout.seeds import evaluation_instance_seed

logger = logging.getLogger(__name__)

Mode = Literal["sampled", "greedy"]
"""Decoding: at the training temperature, or the most likely token."""

STEPS, ITERATION = "evaluation/environment_steps", "evaluation/iteration"
"""Tags of how far training was when an evaluation was made."""

LOGGED = ("return", "success", "turns", "valid_actions", "failures")


class EvaluationCallback(Callback):
    """Plays fixed instances that are never trained on, whatever the seed of the run.

    Instances and samples depend on ``instances`` and the episode's number alone; training instances come from another
    domain of the hash.
    """

    def __init__(
        self,
        episodes: int = 512,
        every_n_iterations: int | None = None,
        at_start: bool = True,
        modes: list[Mode] | None = None,
        instances: int = 0,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """Keep the settings.

        Args:
            episodes: Held-out instances, each played once per mode.
            every_n_iterations: Iterations between evaluations during fit; the end of fit is always evaluated.
            at_start: Whether to evaluate before the first update.
            modes: ``sampled``, ``greedy`` or both (default).
            instances: Names the set of instances; not the seed of the run.
            environment: What is played; that of ``rollout`` by default. An environment that draws its instances from
                a finite set, such as the rows of a file, needs one of its own here to hold any of them out.
        """
        self.modes: list[Mode] = ["sampled", "greedy"] if modes is None else modes
        if episodes < 1:
            raise ValueError(f"evaluation.episodes={episodes} must be at least 1")
        if every_n_iterations is not None and every_n_iterations < 1:
            raise ValueError(f"evaluation.every_n_iterations={every_n_iterations} must be at least 1, or null")
        if not self.modes or any(mode not in get_args(Mode) for mode in self.modes):
            raise ValueError(f"evaluation.modes={self.modes} must be a list of {', '.join(get_args(Mode))}")
        self.episodes, self.every_n_iterations = episodes, every_n_iterations
        self.at_start, self.instances, self.environment = at_start, instances, environment
        self.first: dict[str, float] = {}
        """Metrics of the evaluation before the first update."""
        self.latest: dict[str, float] = {}
        """Metrics of the newest evaluation."""
        self._evaluated_at: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse an environment that cannot be played, or that holds nothing out, before a model is loaded."""
        data = data_module(trainer)
        demonstrated = data.arguments if isinstance(data, DemonstrationsDataModule) else {}
        rollout = callback_of(trainer, RolloutCallback)
        check_held_out(rollout.environment, self.environment, demonstrated)
        played = rollout.environment if self.environment is None else self.environment
        key = "rollout.environment" if self.environment is None else "evaluation.environment"
        instances = [plan.instance_seed for plan in self._plans(trainer.global_rank, trainer.world_size)]
        chat = chat_format(policy_module(pl_module), rollout)
        check_openings(key, played, instances, chat, rollout.engine_config.max_model_len)

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Play all held-out instances in every mode with the present weights; logs and returns the metrics."""
        rollout = callback_of(trainer, RolloutCallback)
        metrics: dict[str, float] = {}
        for mode in self.modes:
            collection = self._play(trainer, pl_module, rollout, mode)
            summary = summarize(collection, summing(trainer))
            shown = {name: summary[name] for name in LOGGED if name in summary} | _mean_scores(collection)
            metrics.update({f"evaluation/{mode}/{name}": value for name, value in shown.items()})
        log_scalars(trainer, metrics | _steps(rollout), rollout.clock.updates)
        self.latest, self._evaluated_at = metrics, rollout.clock.updates
        return metrics

    def _play(self, trainer: Trainer, module: LightningModule, rollout: RolloutCallback, mode: Mode) -> Collection:
        collector = rollout.collector(trainer, policy_module(module), self.environment)
        plans = self._plans(trainer.global_rank, trainer.world_size)
        temperature = 0.0 if mode == "greedy" else None
        bar = trainer.progress_bar_callback
        if not isinstance(bar, LoopProgress):
            return collector.collect(plans, born=rollout.clock, temperature=temperature)
        with bar.phase(f"Evaluation ({mode})", total=len(plans)) as finished:
            return collector.collect(plans, born=rollout.clock, temperature=temperature, progress=finished)

    def _plans(self, rank: int, world_size: int) -> list[EpisodePlan]:
        return [
            EpisodePlan(
                group=episode,
                member=0,
                instance_seed=evaluation_instance_seed(self.instances, episode),
                sampling_key=(self.instances, episode),
            )
            for episode in range(rank, self.episodes, world_size)
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate before the first update of a run that is not resumed."""
        if self.at_start and trainer.global_step == 0:
            self.first = self.evaluate(trainer, pl_module)
            _warn_of_waiting(trainer, self.first)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate when an iteration is over, ahead of ModelCheckpoint, so that a resumed run misses none."""
        if not batch.ends_iteration:
            return
        iteration = trainer.current_epoch + 1
        due = self.every_n_iterations is not None and iteration % self.every_n_iterations == 0
        if due or iteration == trainer.max_epochs:
            metrics = self.evaluate(trainer, pl_module)
            _warn_of_waiting(trainer, metrics)
            pl_module.log_dict(metrics, logger=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate what training ended with, where steps or time ran out before an evaluation was due."""
        if self._evaluated_at != callback_of(trainer, RolloutCallback).clock.updates:
            self.evaluate(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """`freshper validate`."""
        pl_module.log_dict(self.evaluate(trainer, pl_module), logger=False)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """`freshper test`."""
        pl_module.log_dict(self.evaluate(trainer, pl_module), logger=False)

    def state_dict(self) -> dict[str, Any]:
        """The first and the newest metrics, and the clock of the newest."""
        return {"first": self.first, "latest": self.latest, "evaluated_at": self._evaluated_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.first, self.latest = state_dict["first"], state_dict["latest"]
        self._evaluated_at = state_dict["evaluated_at"]


def _warn_of_waiting(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Say which callback waits for a metric that an evaluation lacks; a later one may have it, as a score may be."""
    for callback in getattr(trainer, "callbacks", []):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor.startswith("evaluation/") and monitor not in metrics:
            there = ", ".join(sorted(metrics))
            logger.warning("%s: monitor=%s is not among the metrics: %s", type(callback).__name__, monitor, there)


def _mean_scores(collection: Collection) -> dict[str, float]:
    """Means over the episodes of all ranks that have the score."""
    bank = MetricBank()
    for scores in collection.scores:
        for name, score in scores.items():
            bank.update(name, score)
    return bank.flush()


def _steps(rollout: RolloutCallback) -> dict[str, float]:
    return {STEPS: float(rollout.environment_steps), ITERATION: float(rollout.clock.iteration)}
