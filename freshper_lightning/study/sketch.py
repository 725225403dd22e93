"""Gradients short enough that those of hundreds of groups are in memory, with nearly the same inner products."""

import torch
from torch import Tensor

DIMENSION = 2**15
"""Numbers that are kept of a gradient: inner products are off by 1/181 to 1/128 of the product of both norms."""


class CountSketch:
    """Adds every parameter's derivative, with a random sign, to one of ``dimension`` numbers (Charikar et al. 2002).

    Inner products are unbiased over seeds. For one seed that of vectors u and v is off by at most
    ``sqrt(2 / dimension) * |u| * |v|`` in standard deviation (Weinberger et al. 2009, lemma 2). All vectors that are
    compared go through one sketch, which is linear: the sketch of a sum is the sum of the sketches.

    Args:
        parameters: P, length of a gradient.
        dimension: Numbers that are kept; all of them, unchanged, where ``parameters`` are no more.
        seed: Of places and signs.
    """

    def __init__(self, parameters: int, dimension: int = DIMENSION, seed: int = 0) -> None:
        self.dimension = min(parameters, dimension)
        self._identity = parameters <= dimension
        if not self._identity:
            generator = torch.Generator().manual_seed(seed)
            self._places = torch.randint(dimension, (parameters,), generator=generator)
            self._signs = torch.randint(2, (parameters,), generator=generator).float() * 2 - 1

    def __call__(self, gradient: Tensor) -> Tensor:
        """Float32 [P] on the CPU to [dimension]."""
        if self._identity:
            return gradient
        return torch.zeros(self.dimension).index_add_(0, self._places, gradient * self._signs)
