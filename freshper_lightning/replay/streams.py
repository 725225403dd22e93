"""Random numbers by draw."""

import numpy as np


class DrawStreams:
    """Every draw has random numbers of its own, a function of the seed and the number of the draw alone.

    One counter-based generator serves all: a draw is a range of 2**128 values of its counter, which costs less than a
    new generator.
    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (Philox).
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence(seed))
        self._generator = np.random.Generator(self._bits)
        self._start = self._bits.state

    def of(self, draw: int) -> np.random.Generator:
        """The generator at the beginning of a draw's numbers; the next call sets it back."""
        self._start["state"]["counter"][2] = draw
        self._bits.state = self._start
        return self._generator
