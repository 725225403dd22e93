"""Options of Lightning's trainer and of its callbacks that an iteration of rollouts and replay does not go with."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from lightning import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, OnExceptionCheckpoint, Timer

from freshper_lightning.errors import ConfigurationError

PRECISIONS = ("32-true", "bf16-mixed")
LOGGED_ONLY = ("rollout/", "update/", "replay/", "ess_by_age/", "time/")
"""Beginnings of names that loggers get and that nothing can be monitored by."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse what cannot work, or would not mean what it says.

    Raises:
        ConfigurationError: Names the key, its value and what is allowed.
    """
    if trainer.accumulate_grad_batches < 1:
        raise ConfigurationError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must be at least 1"
        )
    # An integer counts batches: 1 is one batch, 1.0 is all of them.
    if isinstance(trainer.limit_train_batches, int) or trainer.limit_train_batches != 1.0:
        raise ConfigurationError(
            f"trainer.limit_train_batches={trainer.limit_train_batches} (fast_dev_run sets it) must be 1.0, since an"
            " iteration is whole; trainer.max_epochs=1 and small rollout.groups make a short run"
        )
    if trainer.precision not in PRECISIONS:
        raise ConfigurationError(
            f"trainer.precision={trainer.precision} must be one of {', '.join(PRECISIONS)}: others round what"
            " trajectories are stored with, or skip updates whose scaled loss overflows"
        )
    callbacks: list[object] = getattr(trainer, "callbacks", [])
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        raise ConfigurationError(
            "trainer.callbacks must not have a GradientAccumulationScheduler: an iteration has the same number of"
            " micro-batches throughout a run; trainer.accumulate_grad_batches sets it"
        )
    timers = [callback for callback in callbacks if isinstance(callback, Timer) and callback._duration is not None]
    if any(timer._interval != "epoch" for timer in timers):
        raise ConfigurationError(
            "trainer.max_time must be null, and a Timer among trainer.callbacks have interval: epoch: else a run ends"
            " inside an iteration, the rest of which would never be trained on"
        )
    clip = trainer.gradient_clip_val
    if clip is not None and not 0 <= clip < math.inf:
        raise ConfigurationError(f"trainer.gradient_clip_val={clip} must be finite and at least 0, or null")
    _check_monitors(callbacks)
    _check_checkpoints(trainer)


def _check_monitors(callbacks: Iterable[object]) -> None:
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor.startswith(LOGGED_ONLY):
            raise ConfigurationError(
                f"{type(callback).__name__}: monitor={monitor} must be a metric of evaluations, such as"
                " evaluation/sampled/return: others only go to the logs"
            )


def _check_checkpoints(trainer: Trainer) -> None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            raise ConfigurationError(
                f"{type(callback).__name__} must not save on exceptions (save_on_exception), which come in the middle"
                " of an update or a rollout: checkpoint.every_n_train_steps saves between updates, and a run that"
                " becomes NaN leaves last_good.ckpt"
            )
        if getattr(callback, "_train_time_interval", None) is not None and trainer.accumulate_grad_batches > 1:
            raise ConfigurationError(
                "checkpoint.train_time_interval must be null where trainer.accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}: it could save inside an optimizer batch; use every_n_train_steps"
            )
        if isinstance(callback, ModelCheckpoint):
            _check_saving(trainer, callback)


def _check_saving(trainer: Trainer, callback: ModelCheckpoint) -> None:
    if callback._every_n_epochs > 0 and callback._save_on_train_epoch_end is False:
        raise ConfigurationError(
            "checkpoint.save_on_train_epoch_end=False would save at the end of validation, which training does not"
            " have; allowed: true"
        )
    if callback.dirpath is None or trainer.world_size > 1:  # the folder need not be there for every rank
        return
    folder = Path(callback.dirpath)
    nearest = next(part for part in (folder, *folder.parents) if os.path.exists(part))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigurationError(f"checkpoint.dirpath={callback.dirpath!r} must be a folder that can be written to")
