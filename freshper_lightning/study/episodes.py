"""Whole groups of episodes of a policy on disk, played as a training run would play them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.rollout.collector import Collector
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.episode import EpisodePlan
from freshper_lightning.rollout.factory import build_engine
from freshper_lightning.rollout.seeds import training_instance_seed
from freshper_lightning.study.menu import ON_POLICY
from freshper_lightning.trajectory import ClockReading, Trajectory

PROBE, FRESH = 0, -1
"""Iterations whose instances they play; those of training begin at 1."""


def play(
    rollout: RolloutCallback, policy: Path, seed: int, iteration: int, groups: int, device: torch.device
) -> list[list[Trajectory]]:
    """Episodes by group, with group advantages; a function of the weights and the other arguments alone.

    Args:
        rollout: Environment, engine, sampling, group size and penalty are those of the run that is studied.
        policy: Folder of a Hugging Face checkpoint.
        seed: Of instances and samples.
        iteration: ``PROBE`` or ``FRESH``; instances differ between the two and from all of training.
        groups: How many groups.
        device: Where the engine runs.

    Raises:
        TooManyFailuresError: An environment failed; the comparison is of groups that are all there.
    """
    plans = [
        EpisodePlan(group, member, training_instance_seed(seed, iteration, group), (seed, iteration, group, member))
        for group in range(groups)
        for member in range(rollout.group_size)
    ]
    with _collector(rollout, policy, device) as collector:
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
def _collector(rollout: RolloutCallback, policy: Path, device: torch.device) -> Iterator[Collector]:
    truncation = rollout.sampling.truncation()
    engine = build_engine(rollout.engine_config, policy, rollout.seed, device, truncation)
    collector = Collector(
        engine=engine,
        chat=ChatFormat(AutoTokenizer.from_pretrained(policy), history=rollout.history),
        environment=rollout.environment,
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
