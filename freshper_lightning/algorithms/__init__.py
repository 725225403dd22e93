"""Advantages, losses and diagnostics as pure functions; an :class:`Algorithm` is the settings that select them."""

from freshper_lightning.algorithms.algorithm import GRPO, SFT, Algorithm, Reinforce
from freshper_lightning.algorithms.inputs import LossInputs, LossOutput

__all__ = ["GRPO", "SFT", "Algorithm", "LossInputs", "LossOutput", "Reinforce"]
