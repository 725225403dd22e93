"""What a replay buffer was made with."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from freshper_lightning.replay.clock import CLOCKS, ClockName
from freshper_lightning.replay.codec import LogProbDtype
from freshper_lightning.replay.decay import Decay
from freshper_lightning.replay.eviction import Eviction, EvictionName, eviction_of
from freshper_lightning.replay.locking import Turns, exclusive
from freshper_lightning.replay.priority import Priority
from freshper_lightning.replay.requirements import require, require_one_of, require_whole_number
from freshper_lightning.replay.schemes import DrawName, DrawScheme, scheme_of
from freshper_lightning.replay.weights import WeightsOver


@dataclass(frozen=True)
class Parameters:
    """Values that are possible, each alone; :class:`~freshper_lightning.replay.ReplayBuffer` says what they are.

    Raises:
        ValueError: One is out of range; the message names it.
    """

    capacity: int
    priority: Priority
    decay: Decay
    clock: ClockName
    alpha: float
    seed: int
    max_bytes: int | None
    draw: DrawName | DrawScheme
    eviction: EvictionName | Eviction
    asynchronous: bool
    weights: WeightsOver
    log_prob_dtype: LogProbDtype
    memory_map: str | Path | None

    def __post_init__(self) -> None:
        require_whole_number("capacity", self.capacity, 1)
        if self.max_bytes is not None:
            require_whole_number("max_bytes", self.max_bytes, 1)
        require_whole_number("seed", self.seed, 0)
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "in [0, 1]")
        require(isinstance(self.priority, Priority), "priority", self.priority, "a Priority")
        named = type(self.priority).__repr__ is not object.__repr__
        require(named, "priority", self.priority, "a dataclass, whose repr says in a saved state which priority it is")
        require(isinstance(self.decay, Decay), "decay", self.decay, "a Decay")
        require_one_of("clock", self.clock, CLOCKS)
        require_one_of("weights", self.weights, get_args(WeightsOver))
        require_one_of("log_prob_dtype", self.log_prob_dtype, get_args(LogProbDtype))
        where = self.memory_map
        require(where is None or Path(where).is_dir(), "memory_map", where, "an existing folder, or none")
        object.__setattr__(self, "draw", scheme_of(self.draw))
        object.__setattr__(self, "eviction", eviction_of(self.eviction))

    @property
    def directory(self) -> Path | None:
        """Where mapped files are kept, if they are."""
        return None if self.memory_map is None else Path(self.memory_map)


class Parametrised:
    """Something whose parameters stay as they were made, but for the decay, the draw and the seed.

    These three can be assigned, are checked then, and hold from the next call on.
    """

    _lock: Turns

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    @exclusive
    def _replace(self, /, **changes: Any) -> None:
        self._parameters = replace(self._parameters, **changes)

    @property
    def capacity(self) -> int:
        """Greatest number of trajectories."""
        return self._parameters.capacity

    @property
    def max_bytes(self) -> int | None:
        """Greatest number of bytes, if there is one."""
        return self._parameters.max_bytes

    @property
    def priority(self) -> Priority:
        """Base priority at collection."""
        return self._parameters.priority

    @property
    def clock(self) -> ClockName:
        """Unit of age."""
        return self._parameters.clock

    @property
    def alpha(self) -> float:
        """How far priorities matter."""
        return self._parameters.alpha

    @property
    def eviction(self) -> Eviction:
        """What has to go when there is no room."""
        return eviction_of(self._parameters.eviction)

    @property
    def asynchronous(self) -> bool:
        """Whether a thread evaluates priorities ahead of their use."""
        return self._parameters.asynchronous

    @property
    def weights(self) -> WeightsOver:
        """What importance weights are divided by."""
        return self._parameters.weights

    @property
    def decay(self) -> Decay:
        """Freshness as a function of age."""
        return self._parameters.decay

    @decay.setter
    def decay(self, decay: Decay) -> None:
        self._replace(decay=decay)

    @property
    def scheme(self) -> DrawScheme:
        """How a batch is drawn."""
        return scheme_of(self._parameters.draw)

    @scheme.setter
    def scheme(self, draw: DrawName | DrawScheme) -> None:
        self._replace(draw=draw)

    @property
    def seed(self) -> int:
        """Seed of all draws."""
        return self._parameters.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._replace(seed=seed)
