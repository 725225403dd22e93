"""Settings of optimizer and schedule: refused before a model is loaded, and applied to what a checkpoint restored."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from freshper_lightning.errors import ConfigurationError

logger = logging.getLogger(__name__)


def checked_optimizer(
    optimizer: OptimizerCallable, scheduler: LRSchedulerCallable | None, vectors: bool = True
) -> torch.optim.Optimizer:
    """Optimizer and, where given, schedule over a stand-in for the weights; returns the optimizer.

    Args:
        optimizer: Makes it.
        scheduler: Makes the schedule.
        vectors: Whether the weights have vectors beside matrices.

    Raises:
        ConfigurationError: They refuse their settings or such weights, or a number is not finite.
    """
    with _refused("model.optimizer"):
        made = optimizer([torch.nn.Parameter(torch.zeros(size)) for size in ((2, 2), (2,))[: 1 + vectors]])
    for name, value in made.defaults.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"model.optimizer.{name}={value} must be finite")
    if scheduler is not None:
        with _refused("model.scheduler"):
            schedule = scheduler(made)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigurationError(
                "model.scheduler=ReduceLROnPlateau waits for a validation that training does not have; allowed are"
                " schedules by applied updates, such as CosineAnnealingLR"
            )
    return made


@contextmanager
def _refused(key: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        allowed = "numbers in the ranges that its class documents, of which a learning rate is finite and at least 0"
        raise ConfigurationError(f"{key}: {error}; allowed: {allowed}") from error


def kind_of(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Name of the class of the one optimizer; None without any."""
    return type(optimizers[0]).__name__ if optimizers else None


def require_kind(checkpoint: Mapping[str, Any], kind: str | None) -> None:
    """Refuse a checkpoint of another kind of optimizer, whose state this one would read as its own.

    Raises:
        ConfigurationError: Names both.
    """
    saved = checkpoint.get("optimizer", kind)
    if saved != kind:
        raise ConfigurationError(
            f"model.optimizer={kind} must be {saved} as in the checkpoint; a run with another one starts from a policy"
            " that `freshper export` has written"
        )


def apply_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Give a parameter group of a restored optimizer what the configuration says, and name what differs."""
    for key in settings.keys() & group.keys():
        configured, restored = settings[key], group[key]
        # Some optimizers hold their learning rate in a tensor, which rounds it.
        value = torch.full_like(restored, float(configured)) if isinstance(restored, Tensor) else configured
        same = list(restored) == list(value) if key == "betas" else bool(restored == value)
        if not same:
            logger.warning("model.optimizer: %s=%s instead of the checkpoint's %s", key, configured, restored)
            group[key] = value
