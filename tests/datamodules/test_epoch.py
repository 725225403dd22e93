"""Epochs that are drawn together and prepared by the policy ahead of their first update."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules.epoch import Preparation
from freshper_lightning.algorithms import PPO, DecoupledGRPO, ESSGuard
from freshper_lightning.callbacks.freshness import FreshnessCallback
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.errors import ConfigurationError, NonFiniteError
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.replay import ExponentialDecay, UniformPriority
from freshper_lightning.trajectory import ClockReading
from tests.loop import Recorder, fit, policy, replay_data
from tests.policy.transcripts import context, statistics
from tests.replay.builders import make_trajectory

CAP, CLIP = 1.5, 0.2
EPOCHS, K, BATCHES = 2, 2, 2
"""Passes over fresh data, epochs of replay, and optimizer batches of each."""


class Watch(Recorder):
    """Also keeps the parameters and the number of draws before each micro-batch, and the gradient after it."""

    def __init__(self):
        super().__init__()
        self.parameters, self.drawn, self.gradients = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.parameters.append([parameter.detach().clone() for parameter in pl_module.policy.parameters()])
        self.drawn.append(trainer.datamodule.buffer.draws())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten().double() for p in pl_module.policy.parameters()]))

    def first_of_epoch(self, index, accumulate=1):
        """The micro-batch that the epoch of another one begins with."""
        return index - index % (BATCHES * accumulate)


@dataclass
class Run:
    watch: Watch
    folder: str


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_path):
    """Two iterations with one micro-batch per update."""
    watch, module = Watch(), policy(model_path, algorithm=DecoupledGRPO(weight_cap=CAP, clip=CLIP))
    data = replay_data(epochs=EPOCHS, replay_updates=K)
    trainer = fit(tmp_path_factory.mktemp("run"), module, data, extra=(watch,))
    assert [batch.phase for batch in watch.batches] == (["fresh"] * 4 + ["replay"] * 4) * 2
    return Run(watch, trainer.log_dir)


def test_all_draws_of_an_epoch_happen_before_its_first_update_at_one_reading_of_the_clock(run):
    watch = run.watch
    assert watch.drawn == [0, 0, 0, 0, 2, 2, 4, 4, 4, 4, 4, 4, 6, 6, 8, 8]
    for index, draw in enumerate(watch.draws):
        if draw is None:
            continue
        born = torch.tensor([8 * (key // 8) for key in draw.ids.tolist()])
        assert draw.ages.tolist() == (watch.clocks[watch.first_of_epoch(index)].updates - born).tolist()
        assert watch.batches[index].ids.tolist() == draw.ids.tolist()


def test_a_batch_has_the_ages_of_the_policy_that_it_meets(run):
    for batch, clock in zip(run.watch.batches, run.watch.clocks, strict=True):
        assert batch.ages.tolist() == [clock.updates - 8 * (key // 8) for key in batch.ids.tolist()]


def with_parameters(path, parameters):
    net = PolicyNet.from_pretrained(path)
    with torch.no_grad():
        for mine, saved in zip(net.parameters(), parameters, strict=True):
            mine.copy_(saved)
    return net


def test_the_proximal_policy_is_that_before_the_first_update_of_the_epoch(run, model_path):
    watch = run.watch
    for index, batch in enumerate(watch.batches):
        with torch.no_grad():
            first = with_parameters(model_path, watch.parameters[watch.first_of_epoch(index)])
            expected = statistics(first, batch).log_probs
            own = statistics(with_parameters(model_path, watch.parameters[index]), batch).log_probs
        assert torch.equal(batch.proximal_log_probs, expected)
        assert torch.equal(own, expected) == (index % BATCHES == 0)


def test_the_ratio_is_one_at_the_first_update_of_an_epoch_and_not_later(run):
    for index, seen in enumerate(run.watch.observations):
        gap = float((seen.token_metrics["ratio"] - 1).abs().max())
        assert gap < 1e-6 if index % BATCHES == 0 else gap > 1e-3


def test_the_ratio_is_one_there_in_every_micro_batch_in_low_precision_and_with_recomputation(tmp_path, model_path):
    recorder, options = Recorder(), {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    module = policy(model_path, algorithm=DecoupledGRPO(), gradient_checkpointing=True)
    fit(tmp_path, module, replay_data(), iterations=1, extra=(recorder,), **options)
    for index, seen in enumerate(recorder.observations):
        gap = float((seen.token_metrics["ratio"] - 1).abs().max())
        if index % 4 < 2:
            assert gap < 1e-6
        elif not recorder.batches[index].is_filler:
            assert gap > 1e-3
    assert any(batch.spans is not None for batch in recorder.batches)


def plain_log_probs(net, batch):
    """From the model's own logits, one conversation after another."""
    pieces = []
    for place in range(len(batch.ids)):
        mine = batch.segments == place
        logits = net.model(context(batch, place)[None], use_cache=False).logits[0].double()
        rows = batch.position_ids.flatten()[batch.predicted_from[mine]]
        pieces.append(logits.log_softmax(-1)[rows, batch.targets[mine]])
    return torch.cat(pieces)


def gradient_by_hand(current_net, proximal_net, batch):
    """Weight min(proximal / behavior, cap), a constant, times PPO's clipped objective on current / proximal."""
    with torch.no_grad():
        proximal = plain_log_probs(proximal_net, batch)
    weight = (proximal - batch.behavior_log_probs).exp().clamp(max=CAP)
    ratio = (plain_log_probs(current_net, batch) - proximal).exp()
    advantages = batch.advantages
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    per_draw = batch.importance_weights[batch.segments]
    loss = -(per_draw * weight * objective).sum() / batch.lengths.sum()
    parameters = list(current_net.parameters())
    return torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, parameters)])


def test_the_gradient_is_that_of_the_formula(run, model_path):
    watch, capped = run.watch, 0
    for index, batch in enumerate(watch.batches):
        proximal_net = with_parameters(model_path, watch.parameters[watch.first_of_epoch(index)])
        expected = gradient_by_hand(with_parameters(model_path, watch.parameters[index]), proximal_net, batch)
        assert (watch.gradients[index] - expected).norm() <= 1e-4 * expected.norm()
        capped += int((batch.proximal_log_probs - batch.behavior_log_probs > torch.tensor(CAP).log()).sum())
    assert capped > 0
    assert sum(float(seen.token_metrics["clipped"].sum()) for seen in watch.observations) > capped


def test_the_time_of_the_pass_is_logged_where_there_is_one(run, tmp_path, model_path):
    assert all(seconds > 0 for _, seconds in read_scalars(run.folder)["time/prepare"])
    plain = fit(tmp_path, policy(model_path), replay_data(), iterations=1)
    assert "time/prepare" not in read_scalars(plain.log_dir)


def test_skipped_epochs_are_prepared_as_all_others_and_change_nothing(tmp_path, model_path):
    watch = Watch()
    data = replay_data(minimum_size=1000, replay_updates=2)
    module = policy(model_path, algorithm=DecoupledGRPO())
    fit(tmp_path, module, data, iterations=1, extra=(watch,), accumulate_grad_batches=2)
    skipped = watch.batches[4:]
    assert len(skipped) == 8
    assert all(batch.skip and batch.is_filler and len(batch.proximal_log_probs) == 1 for batch in skipped)
    assert all(map(torch.equal, watch.parameters[4], watch.parameters[-1]))


def test_guard_freshness_and_drift_see_the_behavior_policy_and_the_updates_of_the_epoch(tmp_path, model_path):
    """Divergences and weights are of current to behavior, as without preparation; so they grow within an epoch."""
    watch = Watch()
    module = policy(model_path, algorithm=DecoupledGRPO(), guard=ESSGuard(ess_token=1.0))
    data = replay_data(clock="drift", decay=ExponentialDecay(tau=0.05))
    trainer = fit(
        tmp_path, module, data, iterations=2, extra=(watch,), freshness=FreshnessCallback(measured=True, eta=2.0)
    )
    for batch, seen in zip(watch.batches, watch.observations, strict=True):
        log_ratio = seen.token_metrics["log_ratio"]
        proximal = batch.proximal_log_probs - batch.behavior_log_probs
        torch.testing.assert_close(log_ratio, proximal + seen.token_metrics["ratio"].log(), atol=1e-5, rtol=1e-5)
    clocks = [clock.drift for clock in watch.clocks]
    assert all(one < other for one, other in pairwise(clocks))
    factors = read_scalars(trainer.log_dir)["update/replay/lr_factor"]
    assert all(0 < factor < 1 for _, factor in factors)
    # The freshness of what was trained on last is of the policy ahead of that update, not of the proximal one.
    batch, divergence = watch.batches[-1], watch.observations[-1].token_metrics["kl_behavior"]
    columns = data.buffer.state_dict()["columns"]
    for place, key in enumerate(batch.ids.tolist()):
        log_fresh = float(columns["log_fresh"][columns["ids"] == key])
        assert log_fresh == pytest.approx(-2.0 * float(divergence[batch.segments == place].mean()), rel=1e-4)


def bound(fill, settings=None, **fields):
    """A data module without a trainer, whose epochs have two optimizer batches of one micro-batch each."""
    data = replay_data(batch_size=2, **fields)
    data.bind(4, ClockReading, preparation=None if fill is None else Preparation(fill, settings or {}))
    return data


def number(batches):
    """A preparation that leaves a mark of its own on each batch."""
    for place, batch in enumerate(batches):
        batch.proximal_log_probs = torch.full(batch.segments.shape, float(place))


def filled(fill=number, **fields):
    data = bound(fill, **fields)
    data.add_fresh([make_trajectory(advantages=(float(i + 1),), member=i) for i in range(4)])
    return data


def test_the_whole_epoch_is_prepared_in_one_call_in_the_order_of_its_updates():
    calls, seen = [], []

    def count(batches):
        calls.append(len(batches))
        number(batches)

    data = filled(count, replay_updates=1)
    for update in range(4):
        (batch,) = data.optimizer_batch(update)
        seen.append((len(calls), float(batch.proximal_log_probs[0])))
    assert calls == [2, 2]
    assert seen == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]


@pytest.mark.parametrize("begun", [0, 2])
def test_a_restored_epoch_goes_on_with_what_was_drawn_and_prepared(begun):
    def never(batches):
        raise AssertionError("an epoch that has begun is not prepared again")

    data, other = filled(), bound(never)
    data.optimizer_batch(begun)
    other.load_state_dict(data.state_dict())
    (mine,), (restored,) = data.optimizer_batch(begun + 1), other.optimizer_batch(begun + 1)
    assert mine.ids.tolist() == restored.ids.tolist()
    assert restored.proximal_log_probs.unique().tolist() == [1.0]
    for name in ("input_ids", "position_ids", "segments", "advantages", "importance_weights", "ages"):
        assert torch.equal(getattr(mine, name), getattr(restored, name))
    assert (mine.total_tokens, mine.phase) == (restored.total_tokens, restored.phase)
    assert other.effective_draw == data.effective_draw
    if begun == 2:
        for name, column in data.last_draw.columns().items():
            assert torch.equal(column, other.last_draw.columns()[name])
        assert [t.member for t in other.last_draw.trajectories] == [t.member for t in data.last_draw.trajectories]


def test_a_state_holds_no_batch_of_the_epoch_that_is_over():
    data = filled()
    data.optimizer_batch(0), data.optimizer_batch(1)
    assert list(data.state_dict()["epoch"]["batches"]) == [1]
    data.optimizer_batch(2)
    assert list(data.state_dict()["epoch"]["batches"]) == [0, 1]
    assert replay_data().state_dict()["epoch"]["batches"] == {}


def test_a_run_that_prepares_nothing_forgets_the_epoch_that_it_was_resumed_in():
    """Otherwise its own checkpoints would hand on batches that are long over."""
    data, other = filled(), bound(None)
    data.optimizer_batch(2)
    other.load_state_dict(data.state_dict())
    other.optimizer_batch(3)
    assert other.state_dict()["epoch"]["batches"] == {}


def test_an_epoch_goes_on_under_the_settings_that_it_was_prepared_under_and_the_next_one_under_any():
    data, other = filled(settings={"a": 1, "b": 2.5}), bound(number, {"a": 1, "b": 3.5})
    data.optimizer_batch(2)
    other.load_state_dict(data.state_dict())
    with pytest.raises(ConfigurationError, match=r"^b=3\.5, but .* after 1 updates of an epoch .* with 2\.5; resume"):
        other.optimizer_batch(3)
    assert other.optimizer_batch(2)


UNIFORM = {"priority": UniformPriority(), "replay_updates": 1}


def ppo(path, **settings):
    return policy(path, algorithm=PPO(**settings), critic=CriticSettings())


@pytest.fixture(scope="module")
def half_an_epoch(tmp_path_factory, model_path):
    """A checkpoint after one of the two updates of the epoch of replay."""
    folder = tmp_path_factory.mktemp("half")
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(folder / "run", ppo(model_path), replay_data(**UNIFORM), checkpoint=keep, iterations=1)
    return str(folder / "step=3.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0.9}, r"model\.algorithm\.gamma=0\.9, but .* prepared with 1\.0"),
        ({"gae_lambda": 0.5}, r"model\.algorithm\.gae_lambda=0\.5, but .* prepared with"),
    ],
)
def test_a_run_is_not_resumed_inside_an_epoch_with_other_settings_of_its_critic(
    half_an_epoch, tmp_path, model_path, settings, message
):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, ppo(model_path, **settings), replay_data(**UNIFORM), ckpt_path=half_an_epoch)


def test_what_is_not_prepared_may_change_inside_an_epoch(half_an_epoch, tmp_path, model_path):
    fit(tmp_path, ppo(model_path, value_coefficient=0.25), replay_data(**UNIFORM), ckpt_path=half_an_epoch)


def test_an_epoch_that_has_begun_without_preparation_cannot_be_resumed_with_it():
    plain, other = filled(fill=None), bound(number)
    plain.optimizer_batch(2)
    other.load_state_dict(plain.state_dict())
    with pytest.raises(ConfigurationError, match=r"ckpt_path.*after 1 updates of an epoch.*same model\.algorithm"):
        other.optimizer_batch(3)


class Breaks(Callback):
    """Makes the second update of the first replay epoch fail."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            pl_module.temperature = float("nan")


def test_the_last_good_checkpoint_goes_on_with_the_epoch_that_broke(tmp_path, model_path):
    module = policy(model_path, algorithm=DecoupledGRPO())
    broken, after = Watch(), Watch()
    checkpoint = ModelCheckpoint(tmp_path, save_last=False)
    with pytest.raises(NonFiniteError):
        fit(tmp_path, module, replay_data(), checkpoint=checkpoint, iterations=1, extra=(broken, Breaks()))
    restored = policy(model_path, algorithm=DecoupledGRPO())
    path = str(tmp_path / "last_good.ckpt")
    fit(tmp_path / "resumed", restored, replay_data(), iterations=1, extra=(after,), ckpt_path=path)
    assert after.batches[0].ids.tolist() == broken.batches[3].ids.tolist()
    assert torch.equal(after.batches[0].proximal_log_probs, broken.batches[3].proximal_log_probs)
