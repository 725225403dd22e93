"""Held-out trajectories, adaptive tau and measured freshness in the real loop, against what is computed here."""

import math

import numpy as np
import pytest
import torch
from lightning import Callback

from freshper_lightning.algorithms.losses import k3
from freshper_lightning.callbacks.freshness import FreshnessCallback, ProbeConfig, _require_finite
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.errors import ConfigurationError, NumericsError
from freshper_lightning.replay import (
    AbsoluteAdvantage,
    ExponentialDecay,
    HeldOut,
    InverseDecay,
    LogRatios,
    TDError,
    WindowDecay,
)
from freshper_lightning.replay.schemes import WholeGroups
from freshper_lightning.trajectory import ClockReading
from tests.command import in_this_process
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback
from tests.loop import trainer as make_trainer
from tests.replay.builders import make_trajectory
from tests.test_resume import SAVE_AT_END, assert_same, final, scalars

TAU, ALPHA = 5.0, 0.6
PROBE = ProbeConfig(held_out=3, batch_size=8)


class ByHand(Recorder):
    """Also keeps, at the start of each iteration, log-ratios of everything held out, one conversation at a time."""

    def __init__(self, freshness):
        super().__init__()
        self.freshness, self.probed = freshness, []

    def on_train_epoch_start(self, trainer, pl_module):
        items, ages = self.freshness.held_out.probe(PROBE.batch_size, trainer.callbacks[0].clock)
        for item, age in zip(items, ages, strict=True):
            with torch.no_grad():
                logits = pl_module.policy.model(item.token_ids[None].long()).logits[0].float()
            chosen = logits.log_softmax(-1)[item.sampled_positions() - 1].gather(
                1, item.token_ids[item.sampled_positions()].long()[:, None]
            )
            ratio = (chosen[:, 0] - item.behavior_log_probs).double()
            self.probed.append([age, 1.0, len(ratio), float(ratio.sum()), float((ratio**2).sum())])


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, model_path):
    freshness = FreshnessCallback(probe=PROBE, adapt=True, bounds=(2.0, 12.0))
    recorder, data = ByHand(freshness), replay_data(decay=ExponentialDecay(TAU), alpha=ALPHA)
    folder = tmp_path_factory.mktemp("adapted")
    trainer = fit(
        folder,
        policy(model_path),
        data,
        iterations=4,
        freshness=freshness,
        extra=(recorder,),
        accumulate_grad_batches=2,
    )
    return freshness, recorder, data, read_scalars(trainer.log_dir)


def test_what_is_held_out_is_never_trained_on(adapted):
    freshness, recorder, data, _ = adapted
    held_out = {(item.group, item.member) for item in freshness.held_out.probe(99, recorder.clocks[-1])[0]}
    stored = {(item.group, item.member) for item in data.buffer.get(data.buffer.ids())}
    assert len(held_out) == 4 * 3
    assert len(stored) == 4 * 5
    assert not held_out & stored
    trained = {key for batch in recorder.batches for key in batch.ids.tolist()}
    assert trained == set(data.buffer.ids().tolist())


def test_a_probe_is_what_the_policy_says_of_whole_conversations_before_the_first_update(adapted):
    freshness, recorder, _, _ = adapted
    seen = freshness.estimator.state_dict()["held_out"].numpy()
    assert len(seen) == 3 + 6 + 8 + 8
    assert set(seen[:, 0]) == {0.0, 6.0, 12.0, 18.0}
    np.testing.assert_allclose(seen, np.array(recorder.probed), rtol=1e-3, atol=2e-4)
    assert np.abs(seen[seen[:, 0] == 0, 3]).max() < 1e-4, "engine and trainer agree where nothing has moved"
    assert np.abs(seen[seen[:, 0] > 0, 3]).max() > 0.1, "the test is of no use if the policy stands still"


def test_tau_follows_alpha_times_tau_hat_within_step_and_bounds(adapted):
    _, _, data, logged = adapted
    taus = [value for _, value in logged["replay/tau"]]
    estimates = dict(logged["replay/tau_hat_linear_token"])
    assert [step for step, _ in logged["replay/tau"]] == [0, 6, 12, 18]
    assert list(estimates) == [12, 18], "in the first two iterations there is too little to fit"
    for (step, tau), before in zip(logged["replay/tau"], [TAU, *taus], strict=False):
        target = ALPHA * estimates[step] if step in estimates else before
        bounded = min(max(target, before / 2, 2.0), before * 2, 12.0)
        assert tau == pytest.approx(bounded, rel=1e-6)
    assert taus[-1] not in (TAU, 2.0, 12.0), "the test is of no use if only bounds are seen"
    assert data.buffer.decay.tau == pytest.approx(taus[-1], rel=1e-6)


def test_both_levels_and_both_fits_are_logged(adapted):
    logged = adapted[-1]
    for level in ("token", "sequence"):
        for name in ("tau_hat_linear", "tau_hat_quadratic", "quadratic_aic_gain", "s2_at_birth"):
            assert logged[f"replay/{name}_{level}"][-1][0] == 18
    tau_hat = {level: logged[f"replay/tau_hat_linear_{level}"][-1][1] for level in ("token", "sequence")}
    assert tau_hat["sequence"] < tau_hat["token"], "the ratio of a whole trajectory moves faster than that of a token"
    assert logged["time/probe"]


def test_without_probes_everything_is_trained_on_and_only_tau_is_logged(tmp_path, model_path):
    recorder, data = Recorder(), replay_data()
    trainer = fit(tmp_path, policy(model_path), data, iterations=1, extra=(recorder,))
    logged = read_scalars(trainer.log_dir)
    assert len(data.buffer) == 8
    assert logged["replay/tau"] == [(0, 50.0)]
    assert not any("tau_hat" in tag or tag == "time/probe" for tag in logged)


class LastVisits(Recorder):
    """Follows, update by update, what measured freshness has to be."""

    def __init__(self, eta):
        super().__init__()
        self.eta, self.expected, self.ages = eta, {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        now = self.clocks[-1].updates
        self.ages += [(now - self.expected[key][1], age) for key, age in self._known(batch)]

    def _known(self, batch):
        pairs = zip(batch.ids.tolist(), batch.ages.tolist(), strict=True)
        return [(key, age) for key, age in pairs if key in self.expected]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if (batch_idx + 1) % trainer.accumulate_grad_batches or not pl_module.applied:
            return
        first = len(self.observations) - trainer.accumulate_grad_batches
        for one, seen in zip(self.batches[first:], self.observations[first:], strict=True):
            for place, key in enumerate(one.ids.tolist()):
                kl = k3(seen.token_metrics["log_ratio"][one.segments == place]).double().mean()
                self.expected[key] = (-self.eta * float(kl), self.clocks[-1].updates)
        columns = trainer.datamodule.buffer.state_dict()["columns"]
        ids = trainer.datamodule.buffer.ids().tolist()
        for key, log_fresh, since in zip(ids, columns["log_fresh"].tolist(), columns["since"].tolist(), strict=True):
            if key in self.expected:
                assert log_fresh == pytest.approx(self.expected[key][0], rel=1e-4, abs=1e-6)
                assert since == self.expected[key][1]
            else:
                assert log_fresh == 0


def test_every_applied_update_writes_back_its_whole_batch_and_restarts_ages(tmp_path, model_path):
    """The first replay updates are skipped, since the buffer holds too little; nothing is measured in them."""
    visits = LastVisits(eta=3.0)
    freshness = FreshnessCallback(measured=True, eta=3.0)
    fit(
        tmp_path,
        policy(model_path),
        replay_data(minimum_size=12),
        iterations=3,
        freshness=freshness,
        extra=(visits,),
        accumulate_grad_batches=2,
    )
    assert len(visits.expected) == 24
    assert min(fresh for fresh, _ in visits.expected.values()) < -0.01
    assert len({age for _, age in visits.ages}) > 3
    assert all(expected == age for expected, age in visits.ages), "the next draw sees the restarted age"


def test_where_nothing_moves_nothing_goes_stale(tmp_path, model_path):
    freshness = FreshnessCallback(probe=PROBE, adapt=True, measured=True, bounds=(1.0, 15.0))
    data = replay_data(decay=ExponentialDecay(TAU))
    trainer = fit(tmp_path, policy(model_path, lr=0.0), data, iterations=4, freshness=freshness)
    logged = read_scalars(trainer.log_dir)
    assert all(value > 1e6 for _, value in logged["replay/tau_hat_linear_token"])
    assert all(value < 1e-6 for _, value in logged["replay/s2_at_birth_sequence"])
    assert data.buffer.decay == ExponentialDecay(15.0)
    assert data.buffer.state_dict()["columns"]["log_fresh"].abs().max() < 1e-8


class CountForwards(Callback):
    """Forward passes of the policy without gradient."""

    def __init__(self):
        self.count = 0

    def on_fit_start(self, trainer, pl_module):
        pl_module.policy.register_forward_hook(self._hook)

    def _hook(self, *_):
        self.count += not torch.is_grad_enabled()


@pytest.mark.parametrize(("held_out", "expected"), [(0, 0), (2, 2 * 2)])
def test_a_probe_costs_its_forward_passes_every_so_many_iterations_and_nothing_else(
    tmp_path, model_path, held_out, expected
):
    counter = CountForwards()
    probe = ProbeConfig(held_out=held_out, batch_size=8, every_n_iterations=2)
    freshness = FreshnessCallback(probe=probe)
    fit(tmp_path, policy(model_path), replay_data(), iterations=4, freshness=freshness, extra=(counter,))
    assert counter.count == expected, "a probe of 8 in batches of 4"


def test_pure_replay_adds_what_its_draws_see_for_the_first_time(tmp_path, model_path):
    recorder, data = Recorder(), replay_data(epochs=0, alpha=ALPHA)
    freshness = FreshnessCallback(probe=PROBE)
    fit(tmp_path, policy(model_path), data, iterations=2, freshness=freshness, extra=(recorder,))
    visited, expected = set(), []
    for batch, seen in zip(recorder.batches, recorder.observations, strict=True):
        for place, key in enumerate(batch.ids.tolist()):
            if key not in visited:
                ratio = seen.token_metrics["log_ratio"][batch.segments == place].double()
                weight = data.buffer.priority.base(data.buffer.get([key])[0]) ** -ALPHA
                expected.append([float(batch.ages[place]), weight, len(ratio), float(ratio.sum())])
        visited |= set(batch.ids.tolist())
    seen = freshness.estimator.state_dict()["drawn"].numpy()
    np.testing.assert_allclose(seen[:, :4], np.array(expected), rtol=1e-6, atol=1e-9)


def test_draws_by_priorities_that_the_visit_rewrites_are_no_witnesses():
    freshness = FreshnessCallback(probe=PROBE)
    freshness.held_out = HeldOut(8, "updates")
    assert freshness._uses_draws(replay_data(epochs=0, priority=AbsoluteAdvantage()))
    assert not freshness._uses_draws(replay_data(epochs=0, priority=TDError()))


@pytest.mark.parametrize("lost", [-math.inf, math.nan])
def test_a_probability_that_is_lost_stops_the_run_instead_of_spoiling_every_later_fit(tmp_path, lost):
    trainer = make_trainer(tmp_path)
    _require_finite(trainer, np.array([0.0, -300.0]))
    with pytest.raises(NumericsError, match=r"^2 tokens that freshness is measured on .* smaller learning rate"):
        _require_finite(trainer, np.array([lost, 0.0, lost]))


RESUMED = (
    "--freshness.probe.held_out=4",
    "--freshness.probe.batch_size=8",
    "--freshness.adapt=true",
    "--freshness.bounds=[0.5,300]",
    "--freshness.measured=true",
    "--freshness.eta=2.0",
    "--data.alpha=1.0",
    SAVE_AT_END,
    "--checkpoint.every_n_train_steps=4",
    "--checkpoint.save_top_k=-1",
)


def test_a_resumed_run_with_adaptive_tau_and_measured_freshness_ends_as_the_uninterrupted_one(
    tmp_path, monkeypatch, model_path
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    in_this_process(monkeypatch, model_path, whole, *RESUMED)
    taus = [value for _, value in scalars(whole)["replay/tau"]]
    assert taus[-1] != 50.0, "the test is of no use if tau stays that of the configuration"
    checkpoint = whole / "run" / "checkpoints" / "epoch=2-step=16.ckpt"
    in_this_process(monkeypatch, model_path, resumed, *RESUMED, f"--ckpt_path={checkpoint}")
    for mine, theirs in zip(final(resumed), final(whole), strict=True):
        assert_same(mine, theirs)
    expected = scalars(whole)
    for tag, points in scalars(resumed).items():
        assert points == [point for point in expected[tag] if point[0] > 16], tag


@pytest.mark.parametrize(
    ("freshness", "data", "message"),
    [
        ({"adapt": True}, {}, r"freshness\.adapt=True must be false where freshness\.probe\.held_out=0"),
        ({"adapt": True, "probe": PROBE}, {"decay": InverseDecay()}, r"adapt=True needs data\.decay=Exp.*InverseDecay"),
        ({"adapt": True, "probe": PROBE}, {"decay": WindowDecay()}, r"freshness\.adapt=True needs.*WindowDecay"),
        ({"adapt": True, "probe": PROBE}, {"decay": None}, r"freshness\.adapt=True needs.*NoDecay"),
        ({"adapt": True, "probe": PROBE}, {"alpha": 0.0}, r"freshness\.adapt=True must be false where data\.alpha=0"),
        (
            {"adapt": True, "probe": PROBE, "bounds": (1.0, 20.0)},
            {},
            r"freshness\.bounds=\(1\.0, 20\.0\) must be around data\.decay\.tau=50\.0",
        ),
        (
            {"adapt": True, "probe": PROBE},
            {"clock": "drift", "decay": ExponentialDecay(5.0)},
            r"freshness\.bounds=\(1\.0, 1000\.0\) must be set around .* data\.clock=drift: the default is meant for",
        ),
        ({"probe": ProbeConfig(held_out=5)}, {}, r"freshness\.probe\.held_out=5 must be at most half of .* 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, model_path, freshness, data, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, policy(model_path), replay_data(**data), freshness=FreshnessCallback(**freshness))


def test_whole_groups_must_stay_whole(tmp_path, model_path):
    data = replay_data()
    data.buffer.scheme = WholeGroups()
    with pytest.raises(ConfigurationError, match=r"held_out=3 must be 0 where whole groups are drawn"):
        fit(tmp_path, policy(model_path), data, freshness=FreshnessCallback(probe=PROBE))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": 0.0}, r"freshness\.eta=0\.0 must be finite and above 0"),
        ({"eta": math.nan}, r"freshness\.eta=nan must be"),
        ({"level": "turn"}, r"freshness\.level must be one of token, sequence"),
        ({"bounds": (3.0, 2.0)}, r"freshness\.bounds must be"),
        ({"bounds": (1.0, 2.0, 3.0)}, r"freshness\.bounds must be two numbers.*not \(1\.0, 2\.0, 3\.0\)"),
        ({"seed": -1}, r"freshness\.seed=-1 must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FreshnessCallback(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"held_out": -1}, r"freshness\.probe\.held_out=-1 must be at least 0"),
        ({"every_n_iterations": 0}, r"freshness\.probe\.every_n_iterations=0 must be at least 1"),
        ({"batch_size": 600}, r"freshness\.probe\.capacity=512 must be at least 600"),
        ({"held_out": 32, "capacity": 32}, r"freshness\.probe\.capacity=32 must be at least 128 \(4 x held_out"),
        ({"held_out": 8, "capacity": 31, "batch_size": 8}, r"capacity=31 must be at least 32 \(4 x held_out"),
        ({"held_out": 8, "window": 31}, r"freshness\.probe\.window=31 must be at least 32"),
    ],
)
def test_probes_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ProbeConfig(**arguments)


@pytest.mark.parametrize("growth", [1, 3, 8])
def test_the_least_that_is_allowed_is_enough_for_a_fit(growth):
    """Four iterations of one held-out trajectory each, the last 32 observations, whatever buckets they fall into."""
    probe = ProbeConfig(held_out=1, capacity=4, batch_size=4, window=32)
    apart, freshness = HeldOut(probe.capacity, "updates"), FreshnessCallback(probe=probe)
    random, updates = np.random.default_rng(0), 0
    for iteration in range(1, 12):
        updates += growth**iteration  # iterations of unequal length
        now = ClockReading(updates=updates, iteration=iteration)
        apart.take([make_trajectory(turn_tokens=(4,)) for _ in range(2)], 1, now)
        items, ages = apart.probe(probe.batch_size, now)
        seen = random.normal(0.0, np.sqrt(np.repeat(0.01 * ages, 4)))
        freshness.estimator.observe(LogRatios.of_tokens(seen, np.repeat(np.arange(len(items)), 4), ages))
    assert freshness.estimator.fits("token") is not None
    assert freshness.estimator.next_tau(50.0, 0.6) != 50.0


def test_the_callback_must_come_after_the_one_that_moves_the_clock(tmp_path, model_path):
    run = make_trainer(tmp_path, rollout=rollout_callback())
    run.callbacks[0], run.callbacks[1] = run.callbacks[1], run.callbacks[0]
    with pytest.raises(ConfigurationError, match="FreshnessCallback must come after RolloutCallback"):
        run.fit(policy(model_path), datamodule=replay_data())
