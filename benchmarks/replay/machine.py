"""Where something was measured, in words."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def commit() -> str:
    """Abbreviated hash of the checkout, and whether something in it has changed since."""
    command = ["git", "describe", "--always", "--dirty=, changed", "--abbrev=7", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """Processor and versions."""
    names = ("numpy", "torch", "torchrl", "cpprb")
    versions = [f"{name} {found}" for name in names if (found := _version(name))]
    return f"{os.cpu_count()} x {_processor()}; Python {platform.python_version()}, {', '.join(versions)}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
