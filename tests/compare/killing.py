"""Runs that end before their time."""

import os
import signal
from pathlib import Path

from lightning import Callback

from freshper_lightning.checkpoint import ReplayCheckpointIO
from freshper_lightning.errors import NonFiniteError


class KilledOnce(ReplayCheckpointIO):
    """Ends the process with SIGKILL after its first checkpoint, unless it has done so in that folder before."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        flag = Path(path).parents[1] / "killed"
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class EndsEarly(Callback):
    """Ends the run with its first iteration, as somebody's early stopping might."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


class DivergesAbove(Callback):
    """Ends the run as an infinite loss would, at learning rates above a bound."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_batch_end(self, trainer, pl_module, *others):
        if trainer.optimizers[0].param_groups[0]["lr"] > self.rate:
            raise NonFiniteError("the loss of a fresh batch is nan")
