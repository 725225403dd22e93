"""A loader that asks for one optimizer batch after another, never ahead, and resumes in the middle of an iteration."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from lightning import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.packing import TrajectoryBatch


class BatchSource(Protocol):
    """Where the micro-batches of an iteration come from; the number of batches never changes during a run."""

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer batches per iteration."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer batch."""

    def sizes(self) -> dict[str, int]:
        """What the place of a batch in an iteration depends on, by the keys of the configuration."""

    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """The micro-batches of the iteration's ``update``-th optimizer batch, on this rank."""


class IterationLoader:
    """The micro-batches of one iteration after another.

    It has a length because Lightning reads ahead from a loader without one, which would draw from the buffer before
    the first rollout. A position is saved between optimizer batches only.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._position = 0
        self._start = 0

    def __len__(self) -> int:
        return self._source.updates_per_iteration * self._source.micro_batches

    def __iter__(self) -> Iterator[TrajectoryBatch]:
        # The body runs at the first batch that is asked for, not when Lightning calls iter() ahead of the rollout.
        first, self._start = self._start, 0
        self._position = first
        for update in range(first // self._source.micro_batches, self._source.updates_per_iteration):
            for batch in self._source.optimizer_batch(update):
                self._position += 1
                batch.ends_iteration = self._position == len(self)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where in the iteration the loader is, in micro-batches, and the sizes that the iteration has."""
        state = {"position": self._position, "micro_batches": self._source.micro_batches, "length": len(self)}
        return state | {"sizes": self._source.sizes()}

    def rewind(self, position: int) -> None:
        """Count the micro-batches from ``position`` on as not yet handed out, in what is saved from here on."""
        self._position = position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved position.

        Raises:
            ConfigurationError: The position means something else under these settings.
            ValueError: The position is inside an optimizer batch.
        """
        position, saved = state_dict["position"], state_dict["micro_batches"]
        if saved != self._source.micro_batches:
            raise ConfigurationError(
                f"trainer.accumulate_grad_batches={self._source.micro_batches}, but the checkpoint was written with"
                f" {saved}; resume with the same number"
            )
        if position % saved:
            raise ValueError(f"the checkpoint lies inside an optimizer batch (micro-batch {position} of {saved})")
        finished = position == state_dict["length"]
        if not finished:
            self._require_sizes(state_dict.get("sizes", {}))
        self._start = 0 if finished else position

    def _require_sizes(self, saved: dict[str, int]) -> None:
        for key, value in self._source.sizes().items():
            if saved.get(key) != value:
                raise ConfigurationError(
                    f"{key}={value}, but the checkpoint was written in the middle of an iteration with"
                    f" {saved.get(key)}; resume with the same, or from a checkpoint at the end of an iteration"
                )


class LoopDataModule(LightningDataModule, ABC):
    """Data whose batches come from one :class:`IterationLoader`, the same throughout the run.

    EvaluationCallback plays the episodes of `validate` and `test`, which therefore need one dummy batch and no more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loader = IterationLoader(self)

    @property
    @abstractmethod
    def updates_per_iteration(self) -> int:
        """Optimizer batches per iteration."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """What the place of a batch in an iteration depends on, by the keys of the configuration."""

    @abstractmethod
    def optimizer_batch(self, update: int) -> list[TrajectoryBatch]:
        """The micro-batches of the iteration's ``update``-th optimizer batch, on this rank."""

    @property
    def micro_batches(self) -> int:
        """M: micro-batches per optimizer batch."""
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def train_dataloader(self) -> IterationLoader:
        """The one loader of the run; it remembers where in an iteration it is."""
        return self._loader

    def val_dataloader(self) -> list[int]:
        """One dummy batch for `validate`, none during fit.

        ``trainer.validating`` would not tell the two apart: it is true while fit asks for its validation loader.
        """
        return [0] if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING else []

    def test_dataloader(self) -> list[int]:
        """One dummy batch."""
        return [0]


def seed_of_run() -> int:
    """The seed that ``seed_everything`` of Lightning was last called with, in this process or its parent; else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
