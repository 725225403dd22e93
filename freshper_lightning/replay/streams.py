"""Random numbers by draw."""

from typing import Any

import numpy as np


class DrawStreams:
    """Every draw has random numbers of its own, a function of the seed and the number of the draw alone.

    One counter-based generator serves all draws of a seed: a draw is a range of 2**128 values of its counter, which
    costs less than a new generator.
    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (Philox).
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)
        self._start: Any = None

    def of(self, seed: int, draw: int) -> np.random.Generator:
        """The generator at the beginning of a draw's numbers; the next call sets it back."""
        if seed != self._seed:
            self._seed, self._start = seed, np.random.Philox(np.random.SeedSequence(seed)).state
        self._start["state"]["counter"][2] = draw
        self._bits.state = self._start
        return self._generator
