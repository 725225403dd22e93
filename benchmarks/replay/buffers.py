"""The buffers that are compared, by name."""

from functools import partial

from benchmarks.replay.contender import TAU, UPDATES
from benchmarks.replay.measure import Make
from benchmarks.replay.ours import Ours
from benchmarks.replay.payload import BATCH
from benchmarks.replay.published import Published
from freshper_lightning.replay import Decay, ExponentialDecay, InverseDecay, NoDecay, WindowDecay

EXPONENTIAL, INVERSE, WINDOW, NO_DECAY = "ours, exponential", "ours, inverse", "ours, window", "ours, no decay"
TORCHRL, CPPRB, PUBLISHED = "torchrl", "cpprb", "published loops"
OURS = (EXPONENTIAL, INVERSE, WINDOW, NO_DECAY)
BUFFERS = (*OURS, TORCHRL, CPPRB, PUBLISHED)


def maker(name: str, size: int) -> Make:
    """What makes a buffer of that name; the peers are imported only here, since they live in an environment apart."""
    if name in OURS:
        return partial(Ours, decay=_decay(name, size))
    if name == TORCHRL:
        from benchmarks.replay.torchrl_peer import TorchRL

        return TorchRL
    if name == CPPRB:
        from benchmarks.replay.cpprb_peer import Cpprb

        return Cpprb
    return Published


def _decay(name: str, size: int) -> Decay:
    """A window keeps half of the buffer, and never less than the batch that came in last."""
    half = UPDATES * max(size / BATCH / 2, 2)
    decays = {
        EXPONENTIAL: ExponentialDecay(TAU),
        INVERSE: InverseDecay(),
        WINDOW: WindowDecay(half),
        NO_DECAY: NoDecay(),
    }
    return decays[name]
