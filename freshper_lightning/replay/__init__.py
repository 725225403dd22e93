"""Prioritized replay of trajectories; usable on its own, without Lightning."""

from freshper_lightning.replay.buffer import Draw, NothingToDraw, ReplayBuffer
from freshper_lightning.replay.clock import CLOCKS, ClockName, clock_value
from freshper_lightning.replay.decay import Decay, ExponentialDecay, NoDecay
from freshper_lightning.replay.priority import AbsoluteAdvantage, AbsoluteReward, Priority, TDError, UniformPriority
from freshper_lightning.trajectory import ClockReading, Trajectory

__all__ = [
    "CLOCKS",
    "AbsoluteAdvantage",
    "AbsoluteReward",
    "ClockName",
    "ClockReading",
    "Decay",
    "Draw",
    "ExponentialDecay",
    "NoDecay",
    "NothingToDraw",
    "Priority",
    "ReplayBuffer",
    "TDError",
    "Trajectory",
    "UniformPriority",
    "clock_value",
]
