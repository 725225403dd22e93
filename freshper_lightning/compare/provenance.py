"""Which code a result comes from."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code() -> str:
    """Abbreviated hash of the checkout that this package runs from, ``, changed`` where something else than results in
    ``docs`` has changed since; the package's version where it runs from none, and ``unknown`` where it has none."""
    try:
        if not (ROOT / ".git").exists():  # git would take a checkout of somebody else's above
            return version("freshper-lightning")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
        return _git("rev-parse", "--short=7", "HEAD") + (", changed" if changes else "")
    except (OSError, subprocess.CalledProcessError, PackageNotFoundError):
        return "unknown"


@cache
def loaded() -> str:
    """:func:`code` at the first call, which is what a process that runs for hours has in memory."""
    return code()


def of_both(begun: str, ended: str) -> str:
    """Of what was begun with one code and ended with another, which is the same one if all is well."""
    return begun if begun == ended else f"{begun} to {ended}"


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
