"""Commands as processes that end with the one that started them, and that a second comparison cannot run twice."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from freshper_lightning.compare.child import DIVERGED
from freshper_lightning.compare.provenance import ROOT
from freshper_lightning.compare.settings import Limits

PATIENCE = 30.0
"""Seconds between asking a process to end and killing it."""


class RunFailedError(RuntimeError):
    """A command did not end well; the message says where its output is."""


class DivergedError(RunFailedError):
    """A run became NaN or infinite, and would again; the message has its own words."""


class StoppedError(RuntimeError):
    """The comparison is being stopped; nothing is started any more."""


class Processes:
    """The processes that are running now; ended on :meth:`stop`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, command: Sequence[str], output: Path, lock: TextIO) -> None:
        """`freshper COMMAND`, its output appended to a file; ``lock`` stays locked as long as the process lives.

        Raises:
            RunFailedError: The exit code is not 0, or the processor time is used up.
            DivergedError: What was trained became NaN or infinite.
            StoppedError: It was ended by :meth:`stop`, or not started any more.
        """
        with output.open("ab") as file:
            code = self._start(command, file.fileno(), lock.fileno()).wait()
        if self._stopped:
            raise StoppedError
        if code == -signal.SIGXCPU:
            raise RunFailedError(f"more than limits.core_minutes={self._limits.core_minutes:g}; output in {output}")
        if code == DIVERGED:
            raise DivergedError(f"diverged: {_last_line(output)} (output in {output})")
        if code:
            raise RunFailedError(f"exit code {code}; {_last_line(output)} (output in {output})")

    def _start(self, command: Sequence[str], output: int, lock: int) -> subprocess.Popen[bytes]:
        # A soft limit, whose signal tells it from other kills; set by a shell since preexec_fn and threads do not mix.
        minutes = self._limits.core_minutes
        limit = "" if minutes is None else f"ulimit -S -t {max(1, round(minutes * 60))}; "
        limited = ["sh", "-c", f'{limit}exec "$@"', "sh"]
        # The code of this process, and not what stands in the current folder.
        arguments = [*limited, sys.executable, "-P", "-m", "freshper_lightning.compare.child", *command]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": str(self._limits.threads), "PYTHONPATH": path}
        with self._lock:
            if self._stopped:
                raise StoppedError
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[lock],
                start_new_session=True,  # a Ctrl-C is for the comparison, which ends its processes itself
            )
            self._running = {other for other in self._running if other.poll() is None} | {process}
        return process

    def stop(self) -> None:
        """End what is running, and start nothing more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def locked(folder: Path) -> Iterator[TextIO]:
    """The lock of a run's folder; it is held until the block and every process that inherited it have ended.

    Raises:
        RunFailedError: It is held elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFailedError(f"{folder} is in use by another process") from error
        yield file


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
