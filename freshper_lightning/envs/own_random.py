"""Random states of one's own for libraries that draw from the global generators of the process."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_GLOBAL_RANDOM = threading.Lock()
"""Held while somebody has the global states for its own."""


class OwnRandom:
    """States of the global generators of Python and NumPy that are in force inside :meth:`use` alone.

    What draws from the global generators in another thread meanwhile draws from these.

    Args:
        seed: Fixes what is drawn inside.
    """

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Put the states in force, and those from before back at the end; the next use goes on where this one ends."""
        with _GLOBAL_RANDOM:
            outer = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outer[0])
                np.random.set_state(outer[1])
