"""Answers checked in processes of their own, which can be killed and do not matter to the run."""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from threading import BoundedSemaphore, Lock
from weakref import WeakSet, WeakValueDictionary, finalize

from freshper_lightning.errors import require_count, require_setting

SERVER = Path(__file__).with_name("check_server.py")
START_SECONDS = 120.0
"""How long a process may take to import what it needs, on a machine that is busy with something else."""
LOOK_SECONDS = 0.05
"""Time between two looks at the memory of a running check."""


class CheckError(RuntimeError):
    """A check gave no verdict: it was late, took too much memory, raised, or its process died."""


@dataclass(frozen=True)
class Checks:
    """What the processes of a pool check: a file as ``check_server.py`` describes it, and the packages it imports."""

    file: str
    packages: tuple[str, ...]
    needed_by: str
    """Opens the message where a package is missing."""
    remedy: str
    """Closes it."""


EQUIVALENCE = Checks(
    "equivalence.py", ("math_verify", "psutil"), "answers='expression'", "pip install -e '.[math]', or answers='number'"
)


@dataclass(frozen=True)
class CheckLimits:
    """What checks may cost.

    Raises:
        ConfigurationError: A limit is not a number above 0, whole where it counts something.
    """

    checkers: int = 2
    """Checks at once; processes are started when they are first needed."""
    check_seconds: float = 10.0
    """Wall-clock time of one check, the start of a process aside."""
    mebibytes: int = 1024
    """Resident memory of one process."""

    def __post_init__(self) -> None:
        require_count("checkers", self.checkers)
        seconds = self.check_seconds
        timed = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        require_setting("check_seconds", repr(seconds), timed, "a number above 0")
        require_count("mebibytes", self.mebibytes)


class _Worker:
    """One process, which answers one question at a time; after a :class:`CheckError` it is of no further use."""

    def __init__(self, limits: CheckLimits, file: str) -> None:
        import psutil

        self.limits = limits
        self.connection, theirs = Pipe()
        # -P keeps the folder of the program off the path, where its neighbour math.py would hide the standard one. A
        # session of its own keeps Ctrl-C from it; it ends when the connection does.
        what = [str(SERVER.with_name(file)), str(theirs.fileno()), str(limits.check_seconds)]
        command = [sys.executable, "-P", str(SERVER), *what]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # some scorers print
            start_new_session=True,
        )
        theirs.close()
        self.memory = psutil.Process(self.process.pid).memory_info

    def start(self) -> None:
        """Wait until the process is ready.

        Raises:
            CheckError: It is not.
        """
        self._receive(START_SECONDS, "the start of a checker")

    def ask(self, gold: str, answer: str | None, *context: object) -> bool:
        """Whether ``answer`` is right, or without one, whether ``gold`` can be read.

        Raises:
            CheckError: There is no verdict.
        """
        what = "reading" if answer is None else f"the check of {answer[:80]!r} against"
        check = f"{what} {gold[:80]!r}"
        with suppress(BrokenPipeError):  # a dead process is found out below
            self.connection.send((gold, answer, *context))
        verdict = self._receive(self.limits.check_seconds, check)
        if not isinstance(verdict, bool):
            raise CheckError(f"{check} failed: {verdict}")
        return verdict

    def _receive(self, seconds: float, what: str) -> object:
        end = time.monotonic() + seconds
        try:
            while not self.connection.poll(LOOK_SECONDS):
                if time.monotonic() > end:
                    raise CheckError(f"{what} took more than {seconds:g} s")
                if self.mebibytes() > self.limits.mebibytes:
                    raise CheckError(f"{what} took more than {self.limits.mebibytes} MiB")
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise CheckError(f"{what} was lost: its process ended with status {self.process.wait()}") from error

    def mebibytes(self) -> float:
        """Resident memory; 0 where the process has ended."""
        return 0.0 if self.process.poll() is not None else float(self.memory().rss) / 2**20

    def usable(self) -> bool:
        """Whether the process lives, and has not grown so much that the next check could suffer for earlier ones."""
        return self.process.poll() is None and self.mebibytes() < self.limits.mebibytes / 2

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class CheckerPool:
    """A check keeps within ``limits`` and gives its own verdict or a :class:`CheckError`, never a default.

    Threads may check at the same time. A process that was late, grew or died is killed and replaced. The processes
    end with :meth:`close`, with the last reference to the pool, with this process however it ends, and are left alone
    by a child that this process forks, which starts its own.
    """

    def __init__(self, limits: CheckLimits, checks: Checks = EQUIVALENCE) -> None:
        self.limits, self.checks = limits, checks
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._forget()
        finalize(self, _end, self._all, os.getpid())
        _EVERY.add(self)

    def check(self, gold: str, answer: str | None, *context: object) -> bool:
        """Whether ``answer`` is right where ``gold`` is, or without one, whether ``gold`` can be read.

        ``context`` is what else the checks of the pool take.

        Raises:
            CheckError: There is no verdict.
        """
        with self._slots:
            worker = self._take()
            try:
                verdict = worker.ask(gold, answer, *context)
            except BaseException:
                self._remove(worker)
                raise
            self._put(worker)
            return verdict

    def close(self) -> None:
        """End the processes; a later check starts new ones."""
        with self._lock:
            self._idle.clear()
        _end(self._all, os.getpid())

    def pids(self) -> list[int]:
        """Of the living processes."""
        return sorted(worker.process.pid for worker in self._all)

    def _take(self) -> _Worker:
        while (worker := self._pop()) is not None:
            if worker.usable():
                return worker
            self._remove(worker)
        worker = _Worker(self.limits, self.checks.file)
        self._all.add(worker)
        try:
            worker.start()
        except BaseException:
            self._remove(worker)
            raise
        return worker

    def _pop(self) -> _Worker | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _remove(self, worker: _Worker) -> None:
        self._all.discard(worker)
        worker.kill()

    def _forget(self) -> None:
        """Have no processes; those of the parent, after a fork, are closed towards this process and not killed."""
        for worker in self._all:
            worker.connection.close()
        self._idle.clear()
        self._all.clear()
        self._lock, self._slots = Lock(), BoundedSemaphore(self.limits.checkers)


def shared_pool(limits: CheckLimits, checks: Checks = EQUIVALENCE) -> CheckerPool:
    """The pool of these limits and checks: one for all environments of the process, as long as any of them keeps it.

    Raises:
        ValueError: A package is not installed.
    """
    for package in checks.packages:
        if find_spec(package) is None:
            raise ValueError(f"{checks.needed_by} needs the package {package}: {checks.remedy}")
    return _SHARED.setdefault((limits, checks), CheckerPool(limits, checks))


def _end(workers: set[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return
    while workers:
        workers.pop().kill()


def _forget_all() -> None:
    for pool in list(_EVERY):
        pool._forget()


_EVERY: WeakSet[CheckerPool] = WeakSet()
_SHARED: WeakValueDictionary[tuple[CheckLimits, Checks], CheckerPool] = WeakValueDictionary()
os.register_at_fork(after_in_child=_forget_all)
