"""Masses of a moment, from whoever has them."""

from freshper_lightning.replay.masses import Masses, Moment, StaticMasses
from freshper_lightning.replay.refresher import Refresher


class Evaluator:
    """Masses that the decay thread has finished are used if they are exactly those asked for; others are made here.

    So the thread changes how long a draw takes, and nothing else.
    """

    def __init__(self) -> None:
        self._refresher: Refresher | None = None

    def masses(self, static: StaticMasses, now: float) -> Masses:
        """The distribution at a moment; never waits."""
        return static.at(now, self.published)

    def published(self, moment: Moment) -> Masses | None:
        """What the thread has finished, if it is for this very moment."""
        published = self._refresher.published if self._refresher is not None else None
        return published.masses if published is not None and published.moment == moment else None

    def prefetch(self, static: StaticMasses, now: float) -> None:
        """Asks the thread, which starts with the first request, and returns at once."""
        self._refresher = self._refresher or Refresher()
        self._refresher.request(static.request(now))

    def raise_failure(self) -> None:
        """Does nothing unless the thread has failed.

        Raises:
            RuntimeError: The thread has failed; its exception, with traceback, is the cause.
        """
        if self._refresher is not None:
            self._refresher.raise_failure()

    def close(self) -> None:
        """Ends the thread; a later :meth:`prefetch` starts a new one.

        Raises:
            RuntimeError: The thread has failed, and no call has said so yet.
        """
        refresher, self._refresher = self._refresher, None
        if refresher is not None:
            refresher.close()
