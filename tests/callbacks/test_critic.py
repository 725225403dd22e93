"""PPO in the loop: values of the moment, advantages whitened over the optimizer batch, TD errors as priorities."""

import dataclasses

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.algorithms import PPO
from freshper_lightning.callbacks.critic import priorities_of_visit
from freshper_lightning.callbacks.freshness import FreshnessCallback
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.replay import AbsoluteReward, ReplayBuffer, TDError
from tests.loop import fit, policy, replay_data, rollout_callback
from tests.policy.transcripts import packed, statistics

KL = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
EPS = TDError().eps


def ppo(path, lr=1e-2, **settings):
    return policy(path, lr=lr, algorithm=PPO(**settings), critic=CriticSettings())


class Diary(Callback):
    """Priorities as they are stored, beside what they should be; and all that was trained on."""

    def __init__(self):
        self.collected, self.passes, self.visited, self.batches, self.values = [], [], [], [], []
        self.forwards = 0

    def on_fit_start(self, trainer, pl_module):
        pl_module.policy.register_forward_hook(self._count)

    def _count(self, *_):
        self.forwards += 1

    def on_train_epoch_start(self, trainer, pl_module):
        buffer = trainer.datamodule.buffer
        ids = buffer.ids()[-8:]
        self.passes.append(self.forwards)
        with torch.no_grad():
            expected = [mean_error(pl_module, item) for item in buffer.get(ids)]
        self.collected.append((buffer.bases(ids), expected))
        self.forwards = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.values.append(outputs["observation"].token_metrics["value"])
        size = trainer.accumulate_grad_batches
        for one in self.batches[-size:] if (batch_idx + 1) % size == 0 else ():
            errors = one.td_errors.split(one.lengths.tolist())
            expected = [float(e.abs().double().mean()) + EPS for e in errors]
            self.visited.append((trainer.datamodule.buffer.bases(one.ids.numpy()), expected))


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


def test_a_new_trajectory_has_the_priority_of_its_td_errors_where_replay_is_the_first_to_visit_it(tmp_path, model_path):
    diary, module = Diary(), ppo(model_path, **KL)
    data = replay_data(priority=TDError(), epochs=0, replay_updates=1)
    fit(tmp_path, module, data, extra=(diary,), enable_checkpointing=False)
    for stored, expected in diary.collected:
        assert stored.tolist() == pytest.approx(expected, rel=1e-4)
    assert diary.collected[1][1] != diary.collected[0][1]
    assert diary.passes == [1, 2 + 2 + 1], "eight conversations in one pass, beside two updates and their preparation"


def test_collection_runs_no_critic_where_fresh_updates_visit_every_trajectory_ahead_of_any_draw(run):
    diary, updates = run[0], 3 * 2 * 2
    assert diary.passes == [0, 2 * updates], "in between each micro-batch has its update and its preparation"
    assert all(stored.tolist() == [1.0] * 8 for stored, _ in diary.collected)


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


def test_fillers_take_no_part_in_the_whitening(tmp_path, model_path):
    """Optimizer batches of 4 conversations as one micro-batch, and as 8, of which 4 are fillers."""
    found = []
    for parts in (1, 8):
        diary, data = Diary(), replay_data(priority=TDError(), replay_updates=0)
        settings = {"iterations": 1, "accumulate_grad_batches": parts, "enable_checkpointing": False}
        fit(tmp_path / str(parts), ppo(model_path, **KL), data, extra=(diary,), **settings)
        batches = diary.batches[:parts]
        assert sum(batch.is_filler for batch in batches) == parts // 2
        filled = [batch for batch in batches if not batch.is_filler]
        pieces = [piece for b in filled for piece in b.advantages.split(b.lengths.tolist())]
        keys = [key for batch in filled for key in batch.ids.tolist()]
        found.append(dict(zip(keys, pieces, strict=True)))
    assert len(found[0]) == 4
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("measured", [None, True])
def test_visits_are_written_back_once_per_optimizer_batch_ahead_of_the_only_prefetch(
    tmp_path, model_path, monkeypatch, measured
):
    """By RolloutCallback: no other callback is needed. Where freshness is measured, it comes in between."""
    events = []

    def recorded(name):
        method = getattr(ReplayBuffer, name)

        def wrapper(self, *arguments):
            events.append((name, len(arguments[0]) if name == "update_priorities" else None))
            return method(self, *arguments)

        return wrapper

    for name in ("update_priorities", "observe", "prefetch"):
        monkeypatch.setattr(ReplayBuffer, name, recorded(name))
    callbacks = [rollout_callback(), *([FreshnessCallback(measured=True)] if measured else [])]
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "accumulate_grad_batches": 2}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = Trainer(callbacks=callbacks, num_sanity_val_steps=0, **settings, **dict.fromkeys(quiet, False))
    data = replay_data(priority=TDError(), replay_updates=1)
    trainer.fit(ppo(model_path), datamodule=data)
    freshness = [("observe", None)] * 2 if measured else []
    assert events == [("update_priorities", 4), *freshness, ("prefetch", None)] * 4
    assert 1.0 not in data.buffer.bases(data.buffer.ids())


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
