"""Where something was measured, in words."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from freshper_lightning.compare.provenance import code


@contextmanager
def same_commit() -> Iterator[Callable[[], str]]:
    """Which code the body ran with, to be asked for after it; changed where it is another at the end."""
    before = code()
    yield lambda: before if code() == before or before.endswith(", changed") else f"{before}, changed"


def machine(*packages: str) -> str:
    """Processor and :func:`versions`."""
    return f"{os.cpu_count()} x {processor()}; {versions(*packages)}"


def versions(*packages: str) -> str:
    """Of Python and of what is installed of ``packages``."""
    found = [f"{name} {number}" for name in packages if (number := _version(name))]
    return ", ".join([f"Python {platform.python_version()}", *found])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Its name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
