"""The asynchronous decay thread: it evaluates masses ahead of their use, and decides nothing."""

import os
import threading
import weakref
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from freshper_lightning.replay.masses import Masses, Moment, Request, evaluate


@dataclass(frozen=True, slots=True)
class Published:
    """Masses that nobody changes any more, and the moment that they belong to."""

    moment: Moment
    masses: Masses


class _Mailbox:
    """What the thread and its owner share; the thread holds this and not the owner, so that the owner can be freed."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[Request | None] = SimpleQueue()
        self.published: Published | None = None
        self.failure: BaseException | None = None

    def next_request(self) -> Request | None:
        """The newest request; waits for one. ``None`` asks the thread to end."""
        request = self.requests.get()
        while request is not None and not self.requests.empty():
            request = self.requests.get()
        return request

    def serve(self, request: Request) -> None:
        """Publishes the masses that are asked for, unless the content changes meanwhile."""
        try:
            # Content that is being changed can look like anything, which must not be held against the decay.
            with np.errstate(all="ignore"):
                masses = evaluate(request)
        except Exception:
            if request.is_current():
                raise
            return
        if request.is_current():
            self.published = Published(request.moment, masses)

    def run(self) -> None:
        """Body of the thread. A failure ends it and is kept for the owner, who raises it."""
        try:
            while (request := self.next_request()) is not None:
                self.serve(request)
                del request
        except BaseException as failure:
            self.failure = failure


def _stop(mailbox: _Mailbox, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # The thread was left behind in the parent, which stops it.
    mailbox.requests.put(None)
    if thread is not threading.current_thread():
        thread.join()


class Refresher:
    """Evaluates masses in a thread of its own; they are the same whoever evaluates them, so only time is at stake.

    Requests go in through a queue and immutable results come out by one assignment: there is no lock around any work,
    and nothing waits for the thread. A result whose content has changed meanwhile is thrown away. Of several pending
    requests only the newest is served. The thread is a daemon without time-outs; it ends with :meth:`close`, when the
    refresher is freed, and before the interpreter exits. After a fork the child has no thread and serves nothing.
    """

    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        self._process = os.getpid()
        self._failure_raised = False
        thread = threading.Thread(target=self._mailbox.run, name="replay-decay", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._mailbox, thread, self._process)

    @property
    def published(self) -> Published | None:
        """The newest finished masses, for whatever moment they are."""
        return self._mailbox.published

    def request(self, request: Request) -> None:
        """Asks for masses and returns at once; nothing happens in a forked child."""
        if os.getpid() == self._process:
            self._mailbox.requests.put(request)

    def close(self) -> None:
        """Ends the thread and waits for it; a second call does nothing.

        Raises:
            RuntimeError: The thread has failed, and no other call has said so yet.
        """
        self._finalizer()
        if not self._failure_raised:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Does nothing unless the thread has failed.

        Raises:
            RuntimeError: The thread has failed; its exception, with traceback, is the cause.
        """
        failure = self._mailbox.failure
        if failure is not None:
            self._failure_raised = True
            raise RuntimeError("the decay thread of the replay buffer has failed") from failure
