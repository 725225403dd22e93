"""Prioritized replay of trajectories; usable on its own, without Lightning."""

from freshper_lightning.replay.adaptive import AdaptiveTau, LogRatios
from freshper_lightning.replay.buffer import ReplayBuffer
from freshper_lightning.replay.clock import CLOCKS, ClockName, clock_value
from freshper_lightning.replay.decay import Decay, ExponentialDecay, InverseDecay, NoDecay, WindowDecay
from freshper_lightning.replay.draw import Draw
from freshper_lightning.replay.eviction import Eviction, Fifo, HardAge, Lowest
from freshper_lightning.replay.files import read_state, write_state
from freshper_lightning.replay.held_out import HeldOut
from freshper_lightning.replay.priority import (
    AbsoluteAdvantage,
    AbsoluteReward,
    CustomPriority,
    GroupSpread,
    Learnability,
    PositiveReward,
    Priority,
    RatePriority,
    TDError,
    UniformPriority,
)
from freshper_lightning.replay.schemes import (
    DrawScheme,
    GumbelTopK,
    Newest,
    NothingToDraw,
    Oldest,
    Stratified,
    WholeGroups,
)
from freshper_lightning.replay.sharding import Shard, reshard
from freshper_lightning.trajectory import ClockReading, Trajectory

__all__ = [
    "CLOCKS",
    "AbsoluteAdvantage",
    "AbsoluteReward",
    "AdaptiveTau",
    "ClockName",
    "ClockReading",
    "CustomPriority",
    "Decay",
    "Draw",
    "DrawScheme",
    "Eviction",
    "ExponentialDecay",
    "Fifo",
    "GroupSpread",
    "GumbelTopK",
    "HardAge",
    "HeldOut",
    "InverseDecay",
    "Learnability",
    "LogRatios",
    "Lowest",
    "Newest",
    "NoDecay",
    "NothingToDraw",
    "Oldest",
    "PositiveReward",
    "Priority",
    "RatePriority",
    "ReplayBuffer",
    "Shard",
    "Stratified",
    "TDError",
    "Trajectory",
    "UniformPriority",
    "WholeGroups",
    "WindowDecay",
    "clock_value",
    "read_state",
    "reshard",
    "write_state",
]
