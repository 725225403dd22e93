"""Checkpoints that a power cut cannot tear: the buffer in a side file, written before the checkpoint that names it."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules.loader import IterationLoader

DATA_KEY = "ReplayDataModule"
"""Under this key Lightning stores the data module's state."""

SIDE_FILE_SUFFIX = ".buffer"
LAST_GOOD = "last_good.ckpt"


class ReplayCheckpointIO(TorchCheckpointIO):
    """Writes ``<name>.ckpt`` and, before it, the replay buffer to ``<name>.ckpt.buffer``.

    Each file is written under a temporary name, flushed to disk and renamed, so that a checkpoint that exists is
    whole and so is the buffer that it names. Both hold tensors and primitives only and load under
    ``weights_only=True``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the side file, then the checkpoint."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = checkpoint.get(DATA_KEY)
        if state is not None and "buffer" in state:
            side = side_file(path)
            write_atomically(state["buffer"], side)
            checkpoint = {**checkpoint, DATA_KEY: {**state, "buffer": side.name}}
        write_atomically(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint and put the buffer that it names in its place.

        Raises:
            FileNotFoundError: The checkpoint or the buffer beside it is missing.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        checkpoint: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        state = checkpoint.get(DATA_KEY)
        if state is not None and isinstance(state["buffer"], str):
            side = path.parent / state["buffer"]
            if not side.is_file():
                raise FileNotFoundError(f"checkpoint {path} needs the replay buffer {side}, which is not there")
            state["buffer"] = torch.load(side, map_location="cpu", weights_only=True)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint, then its side file."""
        super().remove_checkpoint(path)
        side_file(Path(path)).unlink(missing_ok=True)


def side_file(path: Path) -> Path:
    """Where the buffer of the checkpoint at ``path`` is."""
    return path.with_name(path.name + SIDE_FILE_SUFFIX)


def write_atomically(state: Any, path: Path) -> None:
    """Save ``state`` so that ``path`` holds either what it held before or all of it, whatever interrupts."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def save_last_good(trainer: Trainer, loader: IterationLoader) -> Path:
    """Save ``last_good.ckpt`` out of an exception in the middle of an update; a collective. Returns its path.

    The interrupted optimizer batch counts as not begun: fresh data come again, and a replay batch is a new draw.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    unfinished = progress.current.completed % trainer.accumulate_grad_batches
    for counts in (progress.current, progress.total):
        counts.completed -= unfinished
    loader.rewind(progress.current.completed)
    callback = trainer.checkpoint_callback
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    path = Path(folder or trainer.default_root_dir) / LAST_GOOD
    trainer.save_checkpoint(path)
    return path
