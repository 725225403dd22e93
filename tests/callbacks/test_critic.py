"""PPO in the loop: values of the moment, advantages whitened over the optimizer batch, TD errors as priorities."""

import dataclasses

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.algorithms import PPO
from freshper_lightning.callbacks.critic import priorities_of_visit
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.replay import AbsoluteReward, TDError
from tests.loop import fit, policy, replay_data
from tests.policy.transcripts import packed, statistics

KL = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
EPS = TDError().eps


def ppo(path, lr=1e-2, **settings):
    return policy(path, lr=lr, algorithm=PPO(**settings), critic=CriticSettings())


class Diary(Callback):
    """Priorities as they are stored, beside what they should be; and all that was trained on."""

    def __init__(self):
        self.collected, self.visited, self.batches, self.values = [], [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        buffer = trainer.datamodule.buffer
        ids = buffer.ids()[-8:]
        with torch.no_grad():
            expected = [mean_error(pl_module, item) for item in buffer.get(ids)]
        self.collected.append((buffer.bases(ids), expected))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        errors = batch.td_errors.split(batch.lengths.tolist())
        expected = [float(e.abs().double().mean()) + EPS for e in errors]
        self.visited.append((trainer.datamodule.buffer.bases(batch.ids.numpy()), expected))
        self.batches.append(batch)
        self.values.append(outputs["observation"].token_metrics["value"])


def mean_error(module, item) -> float:
    batch = packed([item])
    values, reference = statistics(module.policy, batch).values.double(), statistics(module.reference, batch).log_probs
    rewards = torch.zeros(item.num_sampled, dtype=torch.float64)
    rewards[item.turn_lengths.cumsum(0) - 1] += item.rewards.double()
    rewards[-1] += item.format_penalty
    rewards -= 0.1 * (item.behavior_log_probs - reference)
    errors = rewards + torch.cat([values[1:], torch.zeros(1)]) - values
    return float(errors.abs().mean()) + EPS


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_path):
    folder, diary = tmp_path_factory.mktemp("ppo"), Diary()
    module, data = ppo(model_path, value_clip=0.01, **KL), replay_data(priority=TDError())
    fit(folder, module, data, extra=(diary,), accumulate_grad_batches=2, enable_checkpointing=False)
    return diary, read_scalars(folder / "run")


def test_a_new_trajectory_has_the_priority_of_its_td_errors_under_the_present_critic(run):
    for stored, expected in run[0].collected:
        assert stored.tolist() == pytest.approx(expected, rel=1e-4)
    assert run[0].collected[1][1] != run[0].collected[0][1]


def test_a_visit_rewrites_the_priority(run):
    assert len(run[0].visited) == 2 * 3 * 2 * 2
    for stored, expected in run[0].visited:
        assert stored.tolist() == pytest.approx(expected)


def test_values_are_those_of_the_network_that_begins_the_epoch(run):
    """The first optimizer batch of an epoch (two micro-batches of four) is trained on by the network that saw it."""
    for place, (batch, values) in enumerate(zip(run[0].batches, run[0].values, strict=True)):
        if place % 4 < 2:
            torch.testing.assert_close(values, batch.values, rtol=1e-5, atol=1e-6)
        else:
            assert (values - batch.values).abs().max() > 1e-3
    assert not run[0].batches[0].values.any()
    assert run[0].batches[-1].values.any()


def test_advantages_are_whitened_over_the_optimizer_batch(run):
    batches = run[0].batches
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        both = torch.cat([first.advantages, second.advantages])
        assert abs(float(both.mean())) < 1e-5
        assert float(both.std(correction=0)) == pytest.approx(1.0, rel=1e-4)
        assert abs(float(first.advantages.mean())) > 1e-4, "a part by itself is not"


def test_the_critic_and_the_divergence_in_the_reward_are_logged(run):
    for phase in ("fresh", "replay"):
        names = ("value_loss", "value_clip_share", "explained_variance", "td_error", "value", "return", "kl_reward")
        assert {f"update/{phase}/{name}" for name in names} <= run[1].keys()
    assert run[1]["update/fresh/kl_reward"][0][1] == pytest.approx(0.0, abs=1e-4)
    assert run[1]["update/replay/kl_reward"][-1][1] > 1e-3
    assert 0 < run[1]["update/replay/value_clip_share"][-1][1] < 1


def test_micro_batches_change_nothing(tmp_path, model_path):
    """Whitening included: statistics are those of the whole optimizer batch."""
    found = []
    for parts in (1, 4):
        module, data = ppo(model_path, lr=1e-3), replay_data(priority=AbsoluteReward(), replay_updates=1, batch_size=8)
        settings = {"iterations": 1, "accumulate_grad_batches": parts, "enable_checkpointing": False}
        fit(tmp_path / str(parts), module, data, **settings)
        found.append([parameter.detach() for parameter in module.net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_a_batch_that_no_critic_has_seen_has_neither_advantages_nor_priorities(run):
    batch = dataclasses.replace(run[0].batches[0], td_errors=None, advantages=None)
    with pytest.raises(ValueError, match="no critic has seen the fresh batch"):
        priorities_of_visit(TDError(), batch)
    with pytest.raises(ValueError, match="a fresh batch has no advantages"):
        batch.token_advantages()


def test_a_run_that_resumes_inside_an_epoch_goes_on_with_its_values_and_priorities(tmp_path, model_path):
    """After the first of two updates of an epoch of replay."""
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    ended = []
    for folder, path in (("whole", None), ("resumed", tmp_path / "step=3.ckpt")):
        module, data = ppo(model_path, value_clip=0.01), replay_data(priority=TDError(), replay_updates=1)
        fit(tmp_path / folder, module, data, ckpt_path=path, checkpoint=keep if path is None else None)
        ended.append([*module.net.parameters(), torch.from_numpy(data.buffer.bases(data.buffer.ids()))])
    assert all(map(torch.equal, *ended))
