"""A buffer's state as a file, for those who use the buffer without a trainer."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch


def write_state(state: dict[str, Any], path: str | Path) -> None:
    """Writes a state; at every moment ``path`` is either what it was or the whole new state, even after a crash."""
    target = Path(path)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f"{target.name}.", suffix=".tmp", delete=False) as file:
        try:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
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
    """Reads what :func:`write_state` wrote; the file is mapped, so that nothing is read twice, and runs no code."""
    state: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return state
