"""The learning rate of a single update."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def scaled_learning_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Within the context every learning rate of ``optimizer`` is ``factor`` times what it is before and after.

    An optimizer that normalises its gradient, as Adam does, is slowed down by nothing else.
    """
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
