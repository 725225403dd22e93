"""The trajectories that every buffer is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshper_lightning.replay import AbsoluteAdvantage
from freshper_lightning.trajectory import ClockReading, Trajectory

BATCH = 128
"""Trajectories that are added, drawn or updated at a time."""
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Payload:
    """Size of one trajectory."""

    tokens: int
    turns: int = 10
    sampled: float = 0.5
    """Share of the tokens that the policy wrote; the others are prompts."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The same ``BATCH`` trajectories in the form that each buffer takes, made before anything is timed."""

    trajectories: Sequence[Trajectory]
    arrays: dict[str, NDArray[Any]]
    """[BATCH, ...] by field, for buffers of arrays. All trajectories are equally long, so that nothing is padded."""
    priorities: NDArray[np.float64]
    """[BATCH]: base priorities; the trajectories' own, for buffers that do not compute them."""


def make_batches(payload: Payload, count: int) -> list[Batch]:
    """Batches of random trajectories."""
    random = np.random.default_rng(0)
    return [_batch([_trajectory(payload, random, index) for index in range(BATCH)]) for _ in range(count)]


def _trajectory(payload: Payload, random: np.random.Generator, index: int) -> Trajectory:
    bounds = np.linspace(0, payload.tokens, payload.turns + 1).round().astype(np.int32)
    lengths = np.maximum((payload.sampled * np.diff(bounds)).round().astype(np.int32), 1)
    starts, ends = np.maximum(bounds[1:] - lengths, 1), bounds[1:]
    return Trajectory(
        token_ids=torch.from_numpy(random.integers(0, _VOCABULARY, payload.tokens, np.int32)),
        turns=torch.from_numpy(np.stack([starts, ends], axis=1)),
        behavior_log_probs=torch.from_numpy(-random.exponential(size=int((ends - starts).sum())).astype(np.float32)),
        rewards=torch.from_numpy(random.random(payload.turns, np.float32)),
        weight_versions=torch.zeros(payload.turns, dtype=torch.int64),
        born=ClockReading(),
        group=index // 8,
        member=index % 8,
        seed=index // 8,
        task="FrozenLake",
        success=bool(index % 2),
        advantages=torch.from_numpy(random.standard_normal(payload.turns, np.float32)),
        group_mean=0.5,
        group_std=0.5,
    )


def _batch(trajectories: list[Trajectory]) -> Batch:
    tensors = ("token_ids", "behavior_log_probs", "turns", "rewards", "weight_versions", "advantages")
    arrays = {name: torch.stack([getattr(item, name) for item in trajectories]).numpy() for name in tensors}
    scalars = ("group", "member", "seed", "group_mean", "group_std")
    arrays |= {name: np.array([getattr(item, name) for item in trajectories]) for name in scalars}
    return Batch(trajectories, arrays, np.array([AbsoluteAdvantage().base(item) for item in trajectories]))
