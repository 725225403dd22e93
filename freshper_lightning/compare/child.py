"""`python -m freshper_lightning.compare.child` is `freshper`, but ends with the process that began it."""

import os
import signal
import sys
import threading
import time
import traceback

DIVERGED = 3
"""Exit code of a run whose numbers have become NaN or infinite, and will again."""

INTERVAL = 1.0
"""Seconds between two looks at the parent."""


def end_with_parent() -> None:
    """Kill this process soon after its parent has gone: one that nobody waits for keeps its folder from the next.

    A parent that can, ends its processes itself; this is for one that was killed. Checkpoints are written so that a
    kill loses nothing.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    from freshper_lightning.cli import main  # takes seconds, in which the parent may go
    from freshper_lightning.errors import NumericsError

    try:
        main()
    except NumericsError:
        traceback.print_exc()
        sys.exit(DIVERGED)
