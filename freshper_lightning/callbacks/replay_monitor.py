"""What the updates and the replay buffer did in an iteration, for the loggers."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.ess import ess_ratio, ess_ratio_by_age, sequence_log_weights
from freshper_lightning.algorithms.values import explained_variance, value_moments
from freshper_lightning.callbacks.metrics import MetricBank, log_scalars
from freshper_lightning.callbacks.parts import callback_of, policy_module, replay_data, summary_writers, summing
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.policy.module import PolicyModule, StepObservation
from freshper_lightning.policy.packing import Phase, TrajectoryBatch
from freshper_lightning.replay import ReplayBuffer
from freshper_lightning.replay.clock import ClockName

AGE_EDGES: dict[ClockName, tuple[float, ...]] = {
    "updates": (1.0, 10.0, 30.0, 100.0, 300.0),
    "iterations": (1.0, 10.0, 30.0, 100.0, 300.0),
    "lr_path": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    "drift": (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    "drift_length": (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0),
}
"""Borders of the age buckets in units of each clock, for runs of any speed: a bucket that stays empty is not logged."""

SHOWN = ("update/demonstration/loss", "update/fresh/loss", "update/replay/ess_token")
"""Metrics on the progress bar."""

RENAMED = {"clipped": "clip_share", "value_clipped": "value_clip_share"}


@dataclass(slots=True)
class _OptimizerBatch:
    """What the micro-batches of one optimizer batch have shown so far."""

    loss: float = 0.0
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)
    sequence_log_ratios: list[Tensor] = field(default_factory=list)
    token_ages: list[Tensor] = field(default_factory=list)
    ages: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)

    def add(self, batch: TrajectoryBatch, observation: StepObservation) -> None:
        self.loss += float(observation.loss)
        if batch.is_filler:
            return
        for name, values in observation.token_metrics.items():
            self.tokens.setdefault(name, []).append(values.detach().cpu())
        segments, ages = batch.segments.cpu(), batch.ages.cpu()
        if "log_ratio" in observation.token_metrics:
            log_ratio = observation.token_metrics["log_ratio"].cpu()
            self.sequence_log_ratios.append(sequence_log_weights(log_ratio, segments, len(ages)))
            self.token_ages.append(ages[segments])
            self.ages.append(ages)
        if batch.advantages is not None:
            first = torch.zeros(len(ages)).index_add_(0, segments, batch.advantages.abs().float().cpu())
            self.advantages.append(first)


class ReplayMonitor(Callback):
    """Means over an iteration's updates, split by fresh and replayed data; written once the iteration is over.

    Its place is after RolloutCallback, whose clock it reads, and ahead of callbacks whose time is none of an update's.
    Every value is at ``x`` = applied optimizer updates. The state is part of the checkpoint, so that an iteration
    that was interrupted is reported as if it had not been.
    """

    def __init__(self) -> None:
        self.bank = MetricBank()
        self.skipped = 0
        """Updates so far that left the policy unchanged."""
        self.guarded = 0
        """Replay updates so far that the guard scaled or skipped."""
        self.trained = {"fresh": 0, "replay": 0, "demonstration": 0}
        """Trajectories trained on so far (with repetition), over all ranks."""
        self._current = _OptimizerBatch()
        self._started = self._seconds_updating = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an iteration that a run before this one was told to stop in; a resumed one does not come here."""
        self.bank = MetricBank()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of the update."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TrajectoryBatch, batch_idx: int
    ) -> None:
        """Count a micro-batch; at the end of an optimizer batch its means, at the end of an iteration the log."""
        self._current.add(batch, outputs["observation"])  # copies from the device, and so waits for it
        self._seconds_updating += time.perf_counter() - self._started
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._count(trainer, pl_module, batch)
        self._current = _OptimizerBatch()
        if batch.ends_iteration:
            self._log(trainer, pl_module)

    def _count(self, trainer: Trainer, pl_module: LightningModule, batch: TrajectoryBatch) -> None:
        module, current, prefix = policy_module(pl_module), self._current, f"update/{batch.phase}"
        data = replay_data(trainer)
        self.guarded += module.guard_factor < 1
        if not batch.skip:  # what the guard skips has been weighed, and counts
            self._count_weights(module, data, batch.phase)
        if not module.applied:
            self.skipped += 1
            return
        self.trained[batch.phase] += int(batch.total_sequences)
        self.bank.update(f"{prefix}/loss", current.loss * trainer.world_size)
        if module.gradient_norm is not None:
            self.bank.update(f"{prefix}/gradient_norm", module.gradient_norm)
        for name, pieces in current.tokens.items():
            self.bank.update(f"{prefix}/{RENAMED.get(name, name)}", torch.cat(pieces))
        if module.algorithm.needs_critic():
            self._count_critic(trainer, current, prefix)
        if data is None:
            return
        drift = callback_of(trainer, RolloutCallback).drift_meter.latest
        if drift is not None:
            self.bank.update("replay/drift_per_update", drift)
        if batch.phase == "replay":
            self._count_draw(data, current.advantages)

    def _count_weights(self, module: PolicyModule, data: ReplayDataModule | None, phase: Phase) -> None:
        if phase == "replay" and module.guard.enabled:
            self.bank.update(f"update/{phase}/lr_factor", module.guard_factor)
        if data is not None and self._current.sequence_log_ratios:
            self._count_effective_size(self._current, f"update/{phase}", AGE_EDGES[data.buffer.clock])

    def _count_critic(self, trainer: Trainer, current: _OptimizerBatch, prefix: str) -> None:
        """How much of the returns' variance values explain, over the optimizer batch on all ranks."""
        values, returns = (torch.cat([torch.empty(0), *current.tokens.get(name, [])]) for name in ("value", "return"))
        explained = explained_variance(summing(trainer)(value_moments(values, returns)))
        if not math.isnan(explained):
            self.bank.update(f"{prefix}/explained_variance", explained)

    def _count_effective_size(self, current: _OptimizerBatch, prefix: str, edges: Sequence[float]) -> None:
        """ESS of the behavior weights over their number: of tokens and of whole trajectories, and by age."""
        weights = {
            "token": (torch.cat(current.tokens["log_ratio"]), torch.cat(current.token_ages)),
            "sequence": (torch.cat(current.sequence_log_ratios), torch.cat(current.ages)),
        }
        for level, (log_weights, ages) in weights.items():
            self.bank.update(f"{prefix}/ess_{level}", ess_ratio(log_weights))
            for bucket, ratio in ess_ratio_by_age(log_weights, ages, edges).items():
                missing = ratio != ratio
                self.bank.update(f"ess_by_age/{level}/{bucket}", 0.0 if missing else ratio, 0.0 if missing else 1.0)

    def _count_draw(self, data: ReplayDataModule, advantages: list[Tensor]) -> None:
        draw = data.last_draw
        if draw is None or len(draw.ids) == 0:  # a rank whose shard is empty
            return
        self.bank.update("replay/age_drawn", torch.from_numpy(draw.ages.astype(np.float64)))
        if advantages:  # an algorithm may compute them anew at every visit
            self.bank.update("replay/nonzero_advantages", (torch.cat(advantages) > 0).double())
        self.bank.update("replay/duplicates", 1.0 - len(np.unique(draw.ids)) / len(draw.ids))
        self.bank.update("replay/effective_draw", data.effective_draw)
        self.bank.update("replay/importance_weight", torch.from_numpy(draw.weights))
        self.bank.update("replay/beta", data.current_beta())

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rollout = callback_of(trainer, RolloutCallback)
        metrics = self.bank.flush() | {"time/update": self._seconds_updating}
        self._seconds_updating = 0.0
        metrics["update/learning_rate"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        data = replay_data(trainer)
        if data is not None:
            metrics |= self._buffer_metrics(trainer, data, rollout)
        log_scalars(trainer, metrics, rollout.clock.updates)
        shown = {key.split("/")[-1]: metrics[key] for key in SHOWN if key in metrics}
        pl_module.log_dict(shown, prog_bar=True, logger=False)

    def _buffer_metrics(self, trainer: Trainer, data: ReplayDataModule, rollout: RolloutCallback) -> dict[str, float]:
        buffer = data.buffer
        ages, probabilities = buffer.ages(rollout.clock), buffer.probabilities(rollout.clock)
        drawable = probabilities[probabilities > 0]
        for writer in summary_writers(trainer) if len(drawable) else ():
            ratio = np.log10(drawable * len(probabilities))
            writer.add_histogram("replay/log10_probability_over_uniform", ratio, rollout.clock.updates)
        seen = sum(self.trained.values())
        metrics = _sums(trainer, buffer, float(ages.sum())) | {
            "replay/skipped": float(self.skipped),
            "replay/guarded": float(self.guarded),
            "replay/share_of_training": self.trained["replay"] / max(seen, 1),
            "replay/lr_path": rollout.clock.lr_path,
            "time/sample": data.seconds_sampling,
        }
        data.seconds_sampling = 0.0
        if policy_module(trainer.lightning_module).algorithm.needs_preparation():
            metrics["time/prepare"], data.seconds_preparing = data.seconds_preparing, 0.0
        return metrics | (self._drift_metrics(rollout) if rollout.measures_drift(data) else {})

    def _drift_metrics(self, rollout: RolloutCallback) -> dict[str, float]:
        """The clocks of drift, and the seconds that measuring it took."""
        seconds, rollout.drift_meter.seconds = rollout.drift_meter.seconds, 0.0
        clock = rollout.clock
        return {"replay/drift": clock.drift, "replay/drift_length": clock.drift_length, "time/drift": seconds}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write out what the loggers hold back: a resumed run logs nothing from before its checkpoint again."""
        for logger in trainer.loggers:
            logger.save()

    def state_dict(self) -> dict[str, Any]:
        """Counts so far and the means of the iteration under way."""
        counts = {"skipped": self.skipped, "guarded": self.guarded, "trained": dict(self.trained)}
        return {"bank": self.bank.state_dict(), **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.bank.load_state_dict(state_dict["bank"])
        self.skipped, self.guarded = state_dict["skipped"], state_dict["guarded"]
        self.trained = dict(state_dict["trained"])


def _sums(trainer: Trainer, buffer: ReplayBuffer, total_age: float) -> dict[str, float]:
    """What the buffers of all ranks hold together; a collective."""
    mine = [len(buffer), buffer.nbytes, buffer.evicted(), len(buffer.pinned()), total_age]
    *counts, ages = summing(trainer)(torch.tensor(mine, dtype=torch.float64)).tolist()
    names = ("size", "bytes", "evicted", "pinned")
    sums = {f"replay/{name}": count for name, count in zip(names, counts, strict=True)}
    return sums | {"replay/age_buffer": ages / max(counts[0], 1.0)}
