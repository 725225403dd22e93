"""The asynchronous decay thread: it evaluates a snapshot ahead of its use, and decides nothing."""

import os
import threading
import weakref
from queue import SimpleQueue

from freshper_lightning.replay.index import Snapshot, SnapshotKey


class _Mailbox:
    """What the thread and its owner share; the thread holds this and not the owner, so that the owner can be freed."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[SnapshotKey | None] = SimpleQueue()
        self.published: Snapshot | None = None
        self.failure: BaseException | None = None

    def next_request(self) -> SnapshotKey | None:
        """The newest request; waits for one. ``None`` asks the thread to end."""
        request = self.requests.get()
        while request is not None and not self.requests.empty():
            request = self.requests.get()
        return request

    def run(self) -> None:
        """Body of the thread. A failure ends it and is kept for the owner, who raises it."""
        try:
            while (request := self.next_request()) is not None:
                self.published = Snapshot.build(request)
        except BaseException as failure:
            self.failure = failure


def _stop(mailbox: _Mailbox, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # The thread was left behind in the parent, which stops it.
    mailbox.requests.put(None)
    if thread is not threading.current_thread():
        thread.join()


class Refresher:
    """Builds snapshots in a thread of its own; a snapshot is the same whoever builds it, so only time is at stake.

    Immutable requests go in through a queue and immutable snapshots come out by one assignment: there is no lock around
    any work, and nothing waits for the thread. Of several pending requests only the newest is served. The thread is a
    daemon without time-outs; it ends with :meth:`close`, when the refresher is freed, and before the interpreter exits.
    After a fork the child has no thread and serves nothing.
    """

    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        self._process = os.getpid()
        self._failure_raised = False
        thread = threading.Thread(target=self._mailbox.run, name="replay-decay", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._mailbox, thread, self._process)

    @property
    def published(self) -> Snapshot | None:
        """The newest finished snapshot, for whatever key it was built."""
        return self._mailbox.published

    def request(self, key: SnapshotKey) -> None:
        """Asks for the snapshot of ``key`` and returns at once; nothing happens in a forked child."""
        if os.getpid() == self._process:
            self._mailbox.requests.put(key)

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
