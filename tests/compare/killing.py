"""A run that dies once."""

import os
import signal
from pathlib import Path

from freshper_lightning.checkpoint import ReplayCheckpointIO


class KilledOnce(ReplayCheckpointIO):
    """Ends the process with SIGKILL after its first checkpoint, unless it has done so in that folder before."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        flag = Path(path).parents[1] / "killed"
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
