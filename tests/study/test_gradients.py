"""Gradients of every loss of the study on real trajectories of a tiny policy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import collate
from freshper_lightning.policy.scoring import chunks, token_log_probs
from freshper_lightning.study import measure
from freshper_lightning.study.episodes import HeldOutPlay, play
from freshper_lightning.study.gradients import group_gradients, log_prob_gradients
from freshper_lightning.study.menu import MENU, ON_POLICY
from freshper_lightning.study.sketch import CountSketch
from freshper_lightning.study.table import Key
from tests.loop import rollout_callback

CPU = torch.device("cpu")


def how():
    rollout = rollout_callback()
    return HeldOutPlay(rollout, rollout.environment)


@pytest.fixture(scope="module")
def probe(model_path):
    return play(how(), Path(model_path), seed=1, part="probe", groups=3, device=CPU)


@pytest.fixture
def net(model_path):
    return PolicyNet.from_pretrained(model_path)


def moved(net: PolicyNet) -> PolicyNet:
    """The policy a little later: far enough that bounds act."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return net


def of_the_trainer(net, algorithm, probe) -> torch.Tensor:
    """The gradient that the training step of the product has on all trajectories as one replay batch."""
    module = PolicyModule(".", algorithm)
    module.net = net
    batch = collate([item for group in probe for item in group], phase="replay")
    batch.total_tokens, batch.total_sequences = float(len(batch.segments)), float(len(batch.lengths))
    forward = (batch.input_ids, batch.position_ids, batch.predicted_from, batch.targets)
    batch.proximal_log_probs = net(*forward).log_probs.detach()
    net.zero_grad()
    module._loss(batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def of_the_study(net, algorithms, probe) -> torch.Tensor:
    items = [item for group in probe for item in group]
    log_probs = token_log_probs(net, chunks(items), 1.0, CPU)
    by_token = [log_prob_gradients(algorithm, probe, log_probs) for algorithm in algorithms]
    return group_gradients(net, probe, by_token, 1.0, CPU, whole(net)).sum(1)


def whole(net) -> CountSketch:
    size = sum(p.numel() for p in net.parameters())
    return CountSketch(size, dimension=size)


def test_at_age_zero_every_loss_has_the_gradient_of_the_on_policy_update(net, probe):
    expected = of_the_trainer(net, ON_POLICY, probe)
    assert expected.abs().max() > 1e-3
    for name, found in zip(MENU, of_the_study(net, MENU.values(), probe), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6, msg=name)


def test_at_later_ages_each_loss_has_the_gradient_of_its_own_training_step(net, probe):
    later = moved(net)
    found = of_the_study(later, MENU.values(), probe)
    for (name, algorithm), gradient in zip(MENU.items(), found, strict=True):
        torch.testing.assert_close(gradient, of_the_trainer(later, algorithm, probe), rtol=1e-3, atol=1e-5, msg=name)
    distinct = {tuple(gradient[:2000].tolist()) for gradient in found}
    assert len(distinct) > 6, "the policy must have moved so far that corrections act"


def test_a_group_of_equal_outcomes_has_no_gradient_and_takes_no_pass(net, probe):
    nothing = torch.zeros(sum(item.num_sampled for group in probe for item in group))
    assert not group_gradients(net, probe, [nothing], 1.0, CPU, whole(net)).any()


def test_fresh_halves_that_are_the_probe_again_have_its_gradient(model_path, probe, monkeypatch):
    study = measure.Study(how(), Path(model_path), seed=1, groups=3, draws=5, device=CPU)
    monkeypatch.setattr(measure, "play", lambda *arguments: [*probe, *probe])
    rows = {(row.loss, row.quantity): row.value for row in study.rows(Key("lake", 1, 0), Path(model_path), probe)}
    for name in MENU:
        assert rows[name, "norm_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert rows["", "return"] == pytest.approx(np.mean([item.episode_return for group in probe for item in group]))


def test_episodes_depend_on_the_arguments_alone_and_fresh_ones_are_of_other_instances(model_path, probe):
    again = play(how(), Path(model_path), seed=1, part="probe", groups=3, device=CPU)
    fresh = play(how(), Path(model_path), seed=1, part="fresh", groups=3, device=CPU)
    assert [[item.token_ids.tolist() for item in group] for group in again] == [
        [item.token_ids.tolist() for item in group] for group in probe
    ]
    seeds = [{item.seed for group in groups for item in group} for groups in (probe, fresh)]
    assert seeds[0].isdisjoint(seeds[1])
    assert {seed % 2 for found in seeds for seed in found} == {1}, "what is trained on has even seeds"
    assert all(len(group) == 4 for group in probe)
