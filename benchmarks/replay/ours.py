"""This project's buffer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.contender import ALPHA, BETA, EPS, Saving
from benchmarks.replay.payload import BATCH, Batch
from freshper_lightning.replay import AbsoluteAdvantage, ClockReading, Decay, NoDecay, ReplayBuffer
from freshper_lightning.replay.codec import LogProbDtype
from freshper_lightning.replay.files import read_state, write_state


class Ours(Saving):
    """``ReplayBuffer`` without its thread, so that every draw pays for all that it needs."""

    def __init__(
        self, capacity: int, batches: Sequence[Batch], decay: Decay, log_prob_dtype: LogProbDtype = "float32"
    ) -> None:
        super().__init__(capacity, batches)
        self._decay, self._log_prob_dtype = decay, log_prob_dtype
        self.decays = not isinstance(decay, NoDecay)
        self.buffer = self._new()

    def _new(self) -> ReplayBuffer:
        return ReplayBuffer(
            self.capacity,
            AbsoluteAdvantage(eps=EPS),
            self._decay,
            alpha=ALPHA,
            asynchronous=False,
            log_prob_dtype=self._log_prob_dtype,
        )

    def _reading(self) -> ClockReading:
        return ClockReading(updates=self.now)

    def add(self) -> None:
        """Computes the priorities too."""
        self.buffer.add(self.next_batch().trajectories, self._reading())

    def keys(self) -> NDArray[np.int64]:
        """Ids."""
        return self.buffer.ids()

    def update(self, keys: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """``update_priorities``."""
        self.buffer.update_priorities(keys, priorities)

    def draw(self) -> None:
        """``sample``."""
        self.buffer.sample(BATCH, self._reading(), BETA)

    def draw_and_read(self) -> None:
        """``sample`` and its trajectories."""
        _ = self.buffer.sample(BATCH, self._reading(), BETA).trajectories

    def decay(self) -> None:
        """A draw of one, which evaluates all priorities at a new reading; nothing where the decay factorises."""
        self.now += 1
        if not self._decay.factorises:
            self.buffer.sample(1, self._reading(), BETA)

    def save(self, path: Path) -> None:
        """The whole state, flushed to disk."""
        write_state(self.buffer.state_dict(), path)

    def load(self, path: Path) -> None:
        """``load_state_dict`` of what was written."""
        self._new().load_state_dict(read_state(path))

    def nbytes(self) -> int:
        """Everything, with the room that is not used."""
        return self.buffer.allocated
