"""The command line on the tiny run: in this process, or in one that may be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from lightning import Callback

from freshper_lightning.checkpoint import ReplayCheckpointIO
from freshper_lightning.cli import main
from freshper_lightning.replay import write_state

ROOT = Path(__file__).parent.parent
TINY = Path(__file__).parent / "data" / "tiny.yaml"
PATIENCE = 900
"""Seconds that a process of a test which trains may take, on a machine that has much else to do."""
WAIT = 300
"""Seconds that a test waits for one thing to happen in a process."""


class KillingCheckpointIO(ReplayCheckpointIO):
    """Ends the process with SIGKILL around a checkpoint: ``after`` so many are whole, or ``within`` the next one."""

    def __init__(self, after: int, within: bool = False) -> None:
        self.after, self.within, self.saved = after, within, 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if self.within and self.saved == self.after:
            Path(f"{path}.tmp").write_bytes(b"torn")
            write_state({}, Path(f"{path}.0.buffer"))
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.saved += 1
        if not self.within and self.saved == self.after:
            os.kill(os.getpid(), signal.SIGKILL)


def environment(model: Path, runs: Path) -> dict[str, str]:
    return {"TINY_MODEL": str(model), "TINY_RUNS": str(runs)}


def in_this_process(monkeypatch, model: Path, runs: Path, *arguments: str, command: str = "fit") -> None:
    for name, value in environment(model, runs).items():
        monkeypatch.setenv(name, value)
    main([command, "-c", str(TINY), *arguments])


def in_another_process(model: Path, runs: Path, *arguments: str, command: str = "fit") -> subprocess.CompletedProcess:
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run(
        [sys.executable, "-m", "freshper_lightning", command, "-c", str(TINY), *arguments],
        cwd=ROOT,
        env=os.environ | environment(model, runs) | threads,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def wait_until(condition, goes_on=lambda: True) -> None:
    """Returns when ``condition`` holds; an error where it does not in time, or where what is waited for has ended."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert goes_on(), "what was waited for has ended before it came to that"
        assert time.monotonic() < deadline, f"what was waited for has not come in {WAIT} s"
        time.sleep(0.05)


class TermsItself(Callback):
    """Asks the process to end, as a scheduler would, in the middle of an iteration."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class SaveAtEnd(Callback):
    """One more checkpoint when fit is over, whatever else triggers them."""

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(Path(trainer.log_dir) / "last_of_all.ckpt")
