"""Folders that a command writes as a whole, in the place of one that it wrote before and of nothing else."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path, is_ours: Callable[[Path], bool], kind: str) -> Iterator[Path]:
    """A new folder, which takes the place of ``path`` at the end of the block, and is removed where that fails.

    Args:
        path: The folder that is to be written; the setting that it came from is called so too.
        is_ours: Whether a folder with something in it holds what the block writes, and nothing else.
        kind: What such a folder is, for the message.

    Raises:
        ValueError: ``path`` is there and is neither empty nor ours, holds the folder that the process runs in, or
            cannot be written.
    """
    folder = Path(path).resolve()
    new, old = (folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.{part}") for part in ("unfinished", "old"))
    with _naming(path):
        _require_replaceable(folder, path, is_ours, kind)
        new.mkdir(parents=True)
    try:
        yield new
        with _naming(path):
            _exchange(folder, new, old)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"path={str(path)!r} cannot be written: {error}") from error


def _exchange(folder: Path, new: Path, old: Path) -> None:
    """Put ``new`` in the place of ``folder``, which becomes ``old``, or leave it where it is if that fails."""
    if not folder.exists():
        new.rename(folder)
        return
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise


def _require_replaceable(folder: Path, path: str | Path, is_ours: Callable[[Path], bool], kind: str) -> None:
    free = not folder.exists() or (folder.is_dir() and (not any(folder.iterdir()) or is_ours(folder)))
    if not free or Path.cwd().is_relative_to(folder):
        raise ValueError(
            f"path={str(path)!r} must be a folder that is not there, is empty or holds {kind} and nothing else, since"
            " it is replaced; and not one that the command runs in"
        )
