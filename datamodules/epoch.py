"""The optimizer batches of one epoch, drawn together and prepared by the policy ahead of the first update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from datamodules.optimizer_batch import OptimizerBatch
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.replay import Draw, ReplayBuffer

Settings = Mapping[str, float | str | bool | None]
"""By the keys of the configuration."""


@dataclass(frozen=True)
class Preparation:
    """How the policy prepares an epoch."""

    fill: Callable[[Sequence[TrajectoryBatch]], None]
    """Fills in, in place, what it says of all micro-batches of an epoch, update after update; a collective."""
    settings: Settings = field(default_factory=dict)
    """What that depends on beside the weights."""


class PreparedEpoch:
    """Batches by their place in the epoch, from the one that is being trained on to the last.

    They are saved, so that a run that is resumed inside an epoch goes on with the batches that were drawn, and with
    what the policy of the epoch's beginning said of them under ``settings``.
    """

    def __init__(self, batches: Mapping[int, OptimizerBatch], settings: Settings) -> None:
        self._batches = dict(batches)
        self._settings = dict(settings)

    def take(self, index: int, settings: Settings) -> OptimizerBatch:
        """The batch of the epoch's ``index``-th update; those before it are forgotten.

        Raises:
            ConfigurationError: It is not there, or prepared under other settings: the run was resumed inside an epoch.
        """
        if index not in self._batches:
            raise ConfigurationError(
                f"ckpt_path: the checkpoint was written after {index} updates of an epoch whose batches were not drawn"
                " together; resume with the same model.algorithm, or from a checkpoint at the end of an iteration"
            )
        for key in sorted(settings.keys() | self._settings.keys()):
            if settings.get(key) != self._settings.get(key):
                raise ConfigurationError(
                    f"{key}={settings.get(key)}, but the checkpoint was written after {index} updates of an epoch that"
                    f" was prepared with {self._settings.get(key)}; resume with the same, or from a checkpoint at the"
                    " end of an iteration"
                )
        self._batches = {place: batch for place, batch in self._batches.items() if place >= index}
        return self._batches[index]

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives: the batches by place (under ``batches``), and the settings."""
        return {
            "batches": {place: _state_of(batch) for place, batch in self._batches.items()},
            "settings": self._settings,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], buffer: ReplayBuffer) -> "PreparedEpoch":
        """What :meth:`state_dict` was taken of; ``buffer`` holds the trajectories."""
        batches = {place: _batch_of(saved, buffer) for place, saved in state["batches"].items()}
        return cls(batches, state["settings"])


def _state_of(batch: OptimizerBatch) -> dict[str, Any]:
    names = [f.name for f in fields(TrajectoryBatch)]
    return {
        "micro_batches": [{name: getattr(micro, name) for name in names} for micro in batch.micro_batches],
        "draw": None if batch.draw is None else batch.draw.columns(),
        "effective_draw": batch.effective_draw,
    }


def _batch_of(state: Mapping[str, Any], buffer: ReplayBuffer) -> OptimizerBatch:
    columns = state["draw"]
    draw = None if columns is None else Draw.of(columns, buffer.get)
    return OptimizerBatch([TrajectoryBatch(**micro) for micro in state["micro_batches"]], draw, state["effective_draw"])
