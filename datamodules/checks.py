"""What the settings of ReplayDataModule must keep to, said by the names of its keys."""

import math
from typing import Literal

from freshper_lightning.errors import ConfigurationError, require_setting
from freshper_lightning.replay import Decay, ExponentialDecay, HardAge, NoDecay, WindowDecay
from freshper_lightning.replay.clock import ClockName
from freshper_lightning.replay.content import ROW_BYTES

LIKE_50_UPDATES: dict[ClockName, str] = {
    "lr_path": "50 x the learning rate",
    "drift": "50 x replay/drift_per_update (0.0002 to 0.002 in the quickstart)",
    "drift_length": "50 x sqrt(2 x replay/drift_per_update)",
}
"""What an age of 50 updates is on clocks that go far less than 1 with an update, and how to find it."""

TOKEN_BYTES = 4

_AGES = (("decay", ExponentialDecay, "tau"), ("decay", WindowDecay, "max_age"), ("eviction", HardAge, "max_age"))


def require(key: str, value: float, holds: bool, allowed: str) -> None:
    """Does nothing if the condition holds and the value is finite.

    Raises:
        ConfigurationError: One of them is not so; the message has key, value and what is allowed.
    """
    require_setting(f"data.{key}", value, holds and math.isfinite(value), allowed)


def decay_of(decay: Decay | Literal["none"] | None) -> Decay:
    """The decay that a setting means.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(decay, Decay):
        return decay
    if decay is None or decay == "none":
        return NoDecay()
    raise ConfigurationError(
        f"data.decay={decay!r} must be none (or null), or a Decay: ExponentialDecay, InverseDecay, WindowDecay"
    )


def require_age_of_clock(clock: ClockName, decay: Decay, eviction: object) -> None:
    """Does nothing unless an age that is meant for updates, a default, stands beside a clock that hardly reaches it.

    Raises:
        ConfigurationError: It does; the message says of which order the age would have to be.
    """
    for key, kind, name in _AGES:
        part = decay if key == "decay" else eviction
        if clock in LIKE_50_UPDATES and isinstance(part, kind) and getattr(part, name) == getattr(kind, name):
            raise ConfigurationError(
                f"data.{key}.{name}={getattr(kind, name)}, the default, is meant for updates, and an age that"
                f" data.clock={clock} hardly ever reaches; give it another value: {LIKE_50_UPDATES[clock]}, see"
                " docs/method.md, Clocks, is like 50 updates"
            )


def require_room(capacity: int, minimum_size: int, iteration: int, ranks: int) -> None:
    """Does nothing if the buffers of all ranks together can hold what they must; ``capacity`` is that of each.

    Raises:
        ConfigurationError: They cannot.
    """
    share = math.ceil(iteration / ranks)
    split = f", of which each of {ranks} ranks holds {share}" if ranks > 1 else ""
    require("capacity", capacity, capacity >= share, f"at least one iteration ({iteration}{split})")
    total = capacity * ranks
    require("minimum_size", minimum_size, minimum_size <= total, f"at most data.capacity x ranks = {total}")


def require_bytes(max_bytes: int | None, iteration: int, ranks: int, longest: int) -> None:
    """Does nothing if an iteration may fit in, one conversation of which has the greatest length.

    Raises:
        ConfigurationError: It cannot.
    """
    if max_bytes is None:
        return
    share = math.ceil(iteration / ranks)
    least = share * ROW_BYTES + longest * TOKEN_BYTES
    room = f"{share} trajectories of an iteration and {longest} tokens (rollout.engine.max_model_len)"
    require("max_bytes", max_bytes, max_bytes >= least, f"at least {least}, for {room}")
