"""Checkpoints that a power cut cannot tear: the buffer in a side file, written before the checkpoint that names it."""

import glob
import itertools
import os
import pickle
import secrets
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules.loader import IterationLoader
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.replay.files import write_state

DATA_KEY = "ReplayDataModule"
"""Under this key Lightning stores the data module's state."""

LAST = "last.ckpt"
LAST_GOOD = "last_good.ckpt"
END = "end.ckpt"


class ReplayCheckpointIO(TorchCheckpointIO):
    """Writes ``<name>.ckpt`` and, before it, the replay buffer to a file of its own that the checkpoint names.

    Each file is written under a temporary name, flushed to disk and renamed, and no buffer is written over another,
    so that whatever interrupts, a checkpoint that exists is whole and finds its own buffer. ``last.ckpt`` in the same
    folder always links to the newest checkpoint. Both files hold tensors and primitives only and load under
    ``weights_only=True``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the side file, then the checkpoint, then the link; drop the side file of a checkpoint written over."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        state, former = checkpoint.get(DATA_KEY), side_files(path)
        if state is not None and "buffer" in state:
            side = path.with_name(f"{path.name}.{secrets.token_hex(4)}.buffer")
            write_state(state["buffer"], side)
            checkpoint = {**checkpoint, DATA_KEY: {**state, "buffer": side.name}}
        write_state(checkpoint, path)
        for side in former:
            side.unlink()
        if path.name != LAST and not path.name.startswith(Path(LAST_GOOD).stem):
            _link_atomically(path.with_name(LAST), path.name)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint and put the buffer that it names in its place; all of it into CPU memory by default.

        Raises:
            ConfigurationError: The checkpoint or the buffer beside it is missing or damaged.
        """
        path = Path(path)
        if not path.is_file():
            raise ConfigurationError(f"there is no checkpoint {path}")
        checkpoint = read_file(path, map_location)
        if not {"state_dict", "pytorch-lightning_version", "loops"} <= checkpoint.keys():
            raise ConfigurationError(f"{path} is not a checkpoint of a run of this program")
        state = checkpoint.get(DATA_KEY)
        if state is not None and isinstance(state["buffer"], str):
            side = path.parent / state["buffer"]
            if not side.is_file():
                raise ConfigurationError(f"checkpoint {path} needs the replay buffer {side}, which is not there")
            state["buffer"] = read_file(side, "cpu")
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint, then its side file."""
        super().remove_checkpoint(path)
        for side in side_files(Path(path)):
            side.unlink()


def side_files(path: Path) -> list[Path]:
    """Buffers written for the checkpoint at ``path``: one, or two where an interruption left an older one behind."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.*.buffer"))


def read_file(path: Path, map_location: Any) -> dict[str, Any]:
    """What :func:`~freshper_lightning.replay.files.write_state` wrote.

    Raises:
        ConfigurationError: The file cannot be read, or holds something else.
    """
    try:
        state = torch.load(path, map_location=map_location, weights_only=True)
    except (OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"{path} is damaged or not a file of this program: {error}") from error
    if not isinstance(state, dict):
        raise ConfigurationError(f"{path} is not a file of this program: it holds a {type(state).__name__}")
    return state


def _link_atomically(link: Path, target: str) -> None:
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def save_last_good(trainer: Trainer, loader: IterationLoader) -> Path:
    """Save ``last_good.ckpt`` out of an exception in the middle of an update; a collective. Returns its path.

    The interrupted optimizer batch counts as not begun: fresh data come again, and so does what was drawn for a whole
    epoch that has begun; any other replay batch is a new draw.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    unfinished = progress.current.completed % trainer.accumulate_grad_batches
    for counts in (progress.current, progress.total):
        counts.completed -= unfinished
        counts.reset_on_restart()  # else the batch that broke counts as begun, in this file and in all later ones
    progress.is_last_batch = False  # else an iteration of this one batch counts as finished when it is resumed
    loader.rewind(progress.current.completed)
    path = _unused(trainer, LAST_GOOD)
    trainer.save_checkpoint(path)
    return path


def nothing_new_to_save(trainer: Trainer) -> None:
    """Tell ModelCheckpoint that what a run starts from is saved already.

    A resumed run would otherwise save again where the step of its checkpoint is due: inside its first optimizer batch,
    in the place of the file that it came from.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step


def save_end(trainer: Trainer) -> None:
    """Save ``end.ckpt`` where training ends later than the newest checkpoint of ModelCheckpoint; a collective."""
    callback = trainer.checkpoint_callback
    if isinstance(callback, ModelCheckpoint) and callback._last_global_step_saved != trainer.global_step:
        trainer.save_checkpoint(_unused(trainer, END))


def _unused(trainer: Trainer, name: str) -> Path:
    """The file of that name, or the first with a version, that is not there or that this run resumes from."""
    path = _folder(trainer) / name
    resumed = None if trainer.ckpt_path is None else Path(trainer.ckpt_path).resolve()
    versions = (path.with_stem(f"{path.stem}-v{number}") for number in itertools.count(1))
    return next(one for one in itertools.chain([path], versions) if not one.exists() or one.resolve() == resumed)


def _folder(trainer: Trainer) -> Path:
    callback = trainer.checkpoint_callback
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    return Path(folder or trainer.default_root_dir)
