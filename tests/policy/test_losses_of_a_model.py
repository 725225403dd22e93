"""Every loss on a real model: packing changes no gradient, and neither does the way through the buffer."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning import Trainer

from datamodules.epoch import Preparation
from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms import GSPO, M2PO, MIS, TIS, DecoupledGRPO, LossInputs, Reinforce
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.policy.preparation import prepare
from freshper_lightning.replay import UniformPriority
from freshper_lightning.trajectory import ClockReading, Trajectory
from tests.algorithms.menu import CRITIC, POLICIES, name_of
from tests.policy.transcripts import alone, packed, statistics, trajectory

ITEMS = [trajectory(length, seed, advantage=(-1.0) ** seed * (1 + seed)) for seed, length in enumerate((9, 30, 12, 17))]
TOTALS = (float(sum(item.num_sampled for item in ITEMS)), float(len(ITEMS)))


@pytest.fixture(scope="module")
def net(model_path):
    return PolicyNet.from_pretrained(model_path)


def gradient(net, algorithm, batches: list[TrajectoryBatch]) -> torch.Tensor:
    """All parameters' gradients, flat."""
    net.zero_grad()
    for batch in batches:
        log_probs = statistics(net, batch).log_probs
        behavior = batch.behavior_log_probs
        inputs = LossInputs(
            log_probs,
            behavior,
            batch.advantages,
            algorithm.coefficients(batch.segments, batch.lengths, *TOTALS),
            batch.importance_weights[batch.segments],
            batch.segments,
            batch.lengths,
            proximal_log_probs=behavior + 0.1 * torch.sin(batch.targets),
            reference_log_probs=behavior,
            entropy=statistics(net, batch).entropy,
            **dict.fromkeys(CRITIC, 0 * behavior),
        )
        algorithm.loss(inputs).loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "algorithm",
    [Reinforce(), GSPO(clip=0.2, clip_high=0.2), M2PO(), MIS(weight_cap=50.0), DecoupledGRPO(weight_level="geometric")],
    ids=name_of,
)
def test_rows_their_order_and_micro_batches_change_no_gradient(net, algorithm):
    together = packed(ITEMS)
    assert together.input_ids.shape[0] < len(ITEMS), "two conversations must share a row"
    expected = gradient(net, algorithm, [together])
    assert expected.abs().max() > 0
    for split in ([[3, 1, 0, 2]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        batches = [packed([ITEMS[index] for index in part]) for part in split]
        torch.testing.assert_close(gradient(net, algorithm, batches), expected, rtol=1e-4, atol=1e-6)


def played(net, with_critic: bool) -> list[Trajectory]:
    """The conversations as an engine with the weights of ``net`` stores them, with rewards for a critic."""
    rewards = dict(enumerate((1.0, 0.0, 0.5, -0.25)))
    return [
        replace(
            item,
            behavior_log_probs=alone(net, item)[0].float(),
            advantages=None if with_critic else item.advantages,
            rewards=torch.tensor([rewards[index]]) if with_critic else item.rewards,
        )
        for index, item in enumerate(ITEMS)
    ]


def module_of(net, algorithm) -> PolicyModule:
    """The module of a run, with the policy as its own reference."""
    module = PolicyModule(".", algorithm)
    module.net = net
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    if algorithm.needs_reference():
        module.reference = net
    return module


def fresh_and_replayed(module, items) -> list[list[TrajectoryBatch]]:
    """The two optimizer batches of an iteration, each of all trajectories, without an update between them."""
    uniform = {"priority": UniformPriority(), "decay": "none", "beta": 1.0}
    data = ReplayDataModule(batch_size=4, replay_updates=1, asynchronous=False, seed=0, **uniform)
    fill = partial(prepare, module, reduce=lambda tensor: tensor)
    data.bind(4, ClockReading, preparation=Preparation(fill) if module.algorithm.needs_preparation() else None)
    data.add_fresh(items)
    return [data.optimizer_batch(update) for update in range(2)]


def gradient_in_training(module, batches) -> torch.Tensor:
    """All parameters' gradients by the loss of the training step, flat."""
    module.policy.zero_grad()
    for batch in batches:
        module._loss(batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in module.policy.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def nets(model_path):
    """Without a critic, and with one that has learned something."""
    plain, critical = PolicyNet.from_pretrained(model_path), PolicyNet.from_pretrained(model_path)
    critical.add_critic(CriticSettings())
    torch.nn.init.normal_(critical.critic.linear.weight, generator=torch.Generator().manual_seed(0))
    return plain, critical


@pytest.mark.parametrize("algorithm", POLICIES, ids=name_of)
def test_a_fresh_sample_replayed_at_age_zero_has_the_gradient_of_the_on_policy_update(nets, algorithm):
    net = nets[algorithm.needs_critic()]
    module, items = module_of(net, algorithm), played(net, algorithm.needs_critic())
    fresh, replayed = fresh_and_replayed(module, items)
    assert {batch.phase for batch in replayed} == {"replay"}
    assert sorted(int(index) for batch in replayed for index in batch.ids) == [0, 1, 2, 3]
    found = gradient_in_training(module, replayed)
    assert found.abs().max() > 1e-2
    torch.testing.assert_close(found, gradient_in_training(module, fresh), rtol=1e-4, atol=1e-6)
    if not algorithm.needs_critic():
        fields = ("aggregation", "aggregation_length", "entropy_coefficient")
        plain = Reinforce(**{name: getattr(algorithm, name) for name in fields})
        torch.testing.assert_close(found, gradient_in_training(module_of(net, plain), fresh), rtol=1e-4, atol=1e-5)


def test_what_was_stored_is_what_a_replayed_sample_is_set_against(nets):
    """Log-probabilities that were stored as half of the policy's make every ratio 2, and the gradient as large."""
    module = module_of(nets[0], TIS(weight_cap=10.0))
    items = played(nets[0], with_critic=False)
    off = [replace(item, behavior_log_probs=item.behavior_log_probs - math.log(2)) for item in items]
    expected, found = (gradient_in_training(module, fresh_and_replayed(module, kind)[1]) for kind in (items, off))
    torch.testing.assert_close(found, 2 * expected, rtol=1e-4, atol=1e-5)
