"""Whole groups of episodes of a policy on disk, played as a training run would play them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer

from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.rollout.collector import Collector, EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.episode import EpisodePlan
from freshper_lightning.rollout.factory import build_engine
from freshper_lightning.rollout.seeds import evaluation_instance_seed, stable_hash
from freshper_lightning.study.menu import ON_POLICY
from freshper_lightning.trajectory import ClockReading, Trajectory

Part = Literal["probe", "fresh"]
"""Of the episodes of a study; the parts have different instances."""


@dataclass(frozen=True)
class HeldOutPlay:
    """How a run plays, and what: instances that it does not train on.

    Args:
        rollout: Engine, sampling, group size and penalty are those of the run that is studied.
        environment: Its evaluations' environment.
    """

    rollout: RolloutCallback
    environment: EnvironmentConfig


def play(
    how: HeldOutPlay, policy: Path, seed: int, part: Part, groups: int, device: torch.device
) -> list[list[Trajectory]]:
    """Episodes by group, with group advantages; a function of the weights and the other arguments alone.

    Args:
        how: The way of playing.
        policy: Folder of a Hugging Face checkpoint.
        seed: Of instances and samples.
        part: Of the study.
        groups: How many groups.
        device: Where the engine runs.

    Raises:
        TooManyFailuresError: An environment failed; the comparison is of groups that are all there.
    """
    domain = stable_hash("study", part, seed)
    plans = [
        EpisodePlan(group, member, evaluation_instance_seed(domain, group), (seed, domain, group, member))
        for group in range(groups)
        for member in range(how.rollout.group_size)
    ]
    with _collector(how, policy, device) as collector:
        played = collector.collect(plans, born=ClockReading()).trajectories
    return by_group(ON_POLICY.advantages(played, _of_one_rank))


def by_group(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each group, in order."""
    found: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.group, []).append(trajectory)
    return list(found.values())


def _of_one_rank(sums: Tensor) -> Tensor:
    return sums


@contextmanager
def _collector(how: HeldOutPlay, policy: Path, device: torch.device) -> Iterator[Collector]:
    rollout = how.rollout
    truncation = rollout.sampling.truncation()
    engine = build_engine(rollout.engine_config, policy, rollout.seed, device, truncation)
    collector = Collector(
        engine=engine,
        chat=ChatFormat(AutoTokenizer.from_pretrained(policy), history=rollout.history),
        environment=how.environment,
        sampling=rollout.sampling,
        format_penalty=rollout.format_penalty,
        max_context=rollout.engine_config.max_model_len,
        max_failure_share=0.0,
    )
    try:
        yield collector
    finally:
        collector.close()
        engine.close()
