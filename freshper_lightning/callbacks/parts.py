"""How callbacks find the other parts of a run."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.tensorboard.writer import SummaryWriter

from datamodules.replay import ReplayDataModule
from freshper_lightning.policy.module import PolicyModule

C = TypeVar("C", bound=Callback)


def policy_module(module: LightningModule) -> PolicyModule:
    """The module as what it has to be.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(module, PolicyModule):
        raise TypeError(f"the callbacks of this package train a PolicyModule, not a {type(module).__name__}")
    return module


def data_module(trainer: Trainer) -> LightningDataModule | None:
    """The trainer's data module, where it has one."""
    found: LightningDataModule | None = getattr(trainer, "datamodule", None)
    return found


def replay_data(trainer: Trainer) -> ReplayDataModule | None:
    """The trainer's data module where it replays, and nothing where it does not."""
    data = data_module(trainer)
    return data if isinstance(data, ReplayDataModule) else None


def callback_of(trainer: Trainer, kind: type[C]) -> C:
    """The trainer's callback of a kind.

    Raises:
        LookupError: There is none.
    """
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if isinstance(callback, kind):
            return callback
    raise LookupError(f"the trainer has no {kind.__name__} among its callbacks")


def summary_writers(trainer: Trainer) -> Iterator[SummaryWriter]:
    """The TensorBoard writers among the trainer's loggers, on the rank that writes."""
    for logger in trainer.loggers:
        writer = getattr(logger, "experiment", None)
        if isinstance(writer, SummaryWriter):
            yield writer


def summing(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    """A callable that sums a tensor over ranks and returns it on the CPU."""

    def reduce(tensor: Tensor) -> Tensor:
        if trainer.world_size == 1:
            return tensor
        strategy = trainer.strategy
        reduced = strategy.reduce(tensor.to(strategy.root_device), reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced.cpu()

    return reduce
