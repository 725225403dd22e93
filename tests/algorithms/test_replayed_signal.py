"""A replayed batch has a gradient: advantages stay what they were in their groups, wherever the members lie."""

import numpy as np
import pytest
import torch

from freshper_lightning.algorithms import GRPO, LossInputs, Reinforce
from freshper_lightning.replay import AbsoluteAdvantage, NoDecay, ReplayBuffer, UniformPriority
from freshper_lightning.trajectory import ClockReading
from tests.algorithms.episodes import alone, episode

GROUPS, SIZE, DRAWS = 60, 4, 4000


WHITENED = Reinforce(baseline="mean_std")
"""Whitened over episodes of different lengths, so that the mean over tokens is not 0."""


def scattered(algorithm):
    """Groups of which a third have different outcomes, with their advantages, in an order that tears groups apart."""
    scores = np.random.default_rng(0).random((GROUPS, SIZE))
    scores[np.arange(GROUPS) % 3 > 0] = 1.0
    lengths = np.random.default_rng(3).integers(1, 6, (GROUPS, SIZE))
    collected = algorithm.advantages(
        [
            episode(group, member, float(scores[group, member]), (int(lengths[group, member]),))
            for group, member in np.ndindex(GROUPS, SIZE)
        ],
        alone,
    )
    return [collected[index] for index in np.random.default_rng(1).permutation(len(collected))]


def drawn(trajectories, priority):
    buffer = ReplayBuffer(
        capacity=len(trajectories), priority=priority, decay=NoDecay(), clock="updates", alpha=1.0, seed=2
    )
    buffer.add(trajectories, ClockReading())
    return list(buffer.sample(DRAWS, ClockReading(), beta=0.0).trajectories)


def share_with_signal(trajectories):
    return float(np.mean([bool(item.advantages.any()) for item in trajectories]))


@pytest.mark.parametrize("algorithm", [GRPO(), WHITENED])
def test_a_uniform_draw_has_the_share_of_signal_that_the_buffer_has(algorithm):
    trajectories = scattered(algorithm)
    stored = share_with_signal(trajectories)
    assert stored == pytest.approx(1 / 3)
    deviation = (stored * (1 - stored) / DRAWS) ** 0.5
    assert abs(share_with_signal(drawn(trajectories, UniformPriority())) - stored) < 4 * deviation


@pytest.mark.parametrize("algorithm", [GRPO(), WHITENED])
def test_a_draw_by_advantage_is_all_signal(algorithm):
    assert share_with_signal(drawn(scattered(algorithm), AbsoluteAdvantage(eps=0.0))) == 1.0


def test_a_filter_keeps_what_has_no_signal_out_of_the_buffer():
    trajectories = scattered(GRPO(group_filter=1e-6))
    assert len(trajectories) == GROUPS * SIZE / 3
    assert share_with_signal(drawn(trajectories, UniformPriority())) == 1.0


@pytest.mark.parametrize("algorithm", [GRPO(), WHITENED, Reinforce(baseline="mean_std", advantage_clip=0.2)])
def test_a_draw_of_lone_members_has_a_gradient(algorithm):
    """No two of one group: statistics over the batch's own groups would make every advantage 0."""
    lone = {item.group: item for item in drawn(scattered(algorithm), AbsoluteAdvantage(eps=0.0))}
    batch = list(lone.values())
    lengths = torch.tensor([item.num_sampled for item in batch])
    count, segments = int(lengths.sum()), torch.arange(len(batch)).repeat_interleave(lengths)
    log_probs = torch.full((count,), -0.5, requires_grad=True)
    advantages = torch.cat([item.token_advantages() for item in batch])
    behavior = torch.cat([item.behavior_log_probs for item in batch])
    coefficients = torch.full((count,), 1 / count)
    inputs = LossInputs(log_probs, behavior, advantages, coefficients, torch.ones(count), segments, lengths)
    algorithm.loss(inputs).loss.backward()
    assert bool((log_probs.grad != 0).all())
    torch.testing.assert_close(log_probs.grad, -advantages / count)
