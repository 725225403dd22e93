"""Compile torchrl's extension for the torch that is installed, from the sources that its wheel ships.

No wheel of torchrl is built against torch 2.13, and a prioritized buffer needs the extension. Needs a C++ compiler.
"""

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from torch.utils.cpp_extension import load


def main() -> None:
    """Put the extension in place of the wheel's own."""
    found = find_spec("torchrl")
    if found is None or found.origin is None:
        raise SystemExit("torchrl is not installed")
    package = Path(found.origin).parent
    sources = [str(path) for path in sorted((package / "csrc").glob("*.cpp"))]
    (installed,) = package.glob("_torchrl*.so")
    with tempfile.TemporaryDirectory() as build:
        load("_torchrl", sources, extra_cflags=["-O3"], build_directory=build, is_python_module=False)
        shutil.copy(Path(build) / "_torchrl.so", installed)


if __name__ == "__main__":
    main()
