"""A buffer's state as a file, for those who use the buffer without a trainer."""

import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import torch


def write_state(state: dict[str, Any], path: str | Path) -> None:
    """Writes a state; at every moment ``path`` is either what it was or the whole new state, even after a crash."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    # Not a file of tempfile, which only its owner may read.
    with unfinished.open("xb") as file:
        try:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException:
            unfinished.unlink()
            raise
    _flush_folder(target.parent)


def _flush_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: str | Path) -> dict[str, Any]:
    """Reads what :func:`write_state` wrote; the file is mapped, so that nothing is read twice, and runs no code.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It is another kind of file, or not the whole of one.
    """
    with open(path, "rb"):
        pass
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} must be the whole file of a saved replay buffer, which it is not: {error}") from error
    return state
