"""Where something was measured, in words."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def commit() -> str:
    """Abbreviated hash of the checkout, and whether something in it but ``docs``, which has results, changed since."""
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
    return _git("rev-parse", "--short=7", "HEAD") + (", changed" if changes else "")


@contextmanager
def same_commit() -> Iterator[Callable[[], str]]:
    """:func:`commit` of the body's begin, to be asked for after it; changed where it is another at the end."""
    before = commit()
    yield lambda: before if commit() == before or before.endswith(", changed") else f"{before}, changed"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


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
