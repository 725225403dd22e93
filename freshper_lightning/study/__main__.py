"""`python -m freshper_lightning.study`: see :func:`freshper_lightning.study.staleness.staleness`."""

import sys

import jsonargparse

from freshper_lightning.cli import quiet
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.study.staleness import staleness

if __name__ == "__main__":
    quiet()
    try:
        jsonargparse.auto_cli(staleness, prog="python -m freshper_lightning.study", as_positional=False)
    except (ConfigurationError, ValueError) as error:
        sys.exit(f"freshper: error: {error}")
