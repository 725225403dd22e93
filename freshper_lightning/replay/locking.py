"""One call at a time."""

import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=Any)


class Turns:
    """A lock for one thread at a time, which may take it several times, and which no fork leaves locked for ever.

    A forked child has none of the threads that were inside a call: their locks are opened there, and what they were
    changing is refused, since it may be half changed.

    Raises:
        RuntimeError: This is the child of a fork during a call of another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self._torn = False
        _every.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._torn:
            self._lock.release()
            raise RuntimeError(
                "this replay buffer was in use by another thread when the process was forked, and may be half changed:"
                " use it in the parent, or fork while no other thread uses it"
            )
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()

    def renew(self) -> None:
        """Opens the lock in a forked child, unless the thread that forked holds it, which goes on there."""
        if self._holder == threading.get_ident():
            return
        self._torn = self._torn or self._depth > 0
        self._lock, self._holder, self._depth = threading.RLock(), None, 0


_every: weakref.WeakSet[Turns] = weakref.WeakSet()


def _renew_every() -> None:
    for turns in list(_every):
        turns.renew()


os.register_at_fork(after_in_child=_renew_every)


def exclusive(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """The method, holding the lock ``_lock`` of its object."""

    @wraps(method)
    def locked(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked
