"""Advantages, losses and diagnostics as pure functions; an :class:`Algorithm` is the settings that select them."""

from freshper_lightning.algorithms.algorithm import GRPO, SFT, Reinforce
from freshper_lightning.algorithms.base import Algorithm
from freshper_lightning.algorithms.ess_guard import ESSGuard
from freshper_lightning.algorithms.inputs import LossInputs, LossOutput, ValueInputs
from freshper_lightning.algorithms.ppo import PPO
from freshper_lightning.algorithms.presets import (
    CISPO,
    DAPO,
    GSPO,
    M2PO,
    MIS,
    RLOO,
    TIS,
    TOPR,
    DecoupledGRPO,
    DrGRPO,
    ReinforcePlusPlusBaseline,
)

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "M2PO",
    "MIS",
    "PPO",
    "RLOO",
    "SFT",
    "TIS",
    "TOPR",
    "Algorithm",
    "DecoupledGRPO",
    "DrGRPO",
    "ESSGuard",
    "LossInputs",
    "LossOutput",
    "Reinforce",
    "ReinforcePlusPlusBaseline",
    "ValueInputs",
]
