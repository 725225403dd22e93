"""The ESS guard through the real loop: what it decides on, what it does to an update, and what it counts."""

import math
from datetime import timedelta

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.algorithms import ESSGuard
from freshper_lightning.algorithms.ess import ess_ratio, sequence_log_weights
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.policy.learning_rate import scaled_learning_rate
from tests.loop import Recorder, fit, policy, replay_data
from tests.policy.test_module import Watch, slower


class Displacements(Callback):
    """How far each optimizer batch moved the parameters, and the guard's factor."""

    def __init__(self):
        self.moved, self.factors, self.phases, self.rates = [], [], [], []
        self.before = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.before = self.flat(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.moved.append(self.flat(pl_module) - self.before)
            self.factors.append(pl_module.guard_factor)
            self.phases.append(batch.phase)
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    @staticmethod
    def flat(module):
        return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def run(folder, model_path, guard, accumulate=1, iterations=2, **fields):
    seen, recorder = Displacements(), Recorder()
    module = policy(model_path, guard=guard, **fields)
    data, options = replay_data(replay_updates=1), {"iterations": iterations, "accumulate_grad_batches": accumulate}
    trainer = fit(folder, module, data, extra=(seen, recorder), **options)
    return trainer, seen, recorder


def measured(recorder, level, accumulate):
    """ESS ratio of the weights of each optimizer batch, from what its micro-batches showed."""
    ratios = []
    for start in range(0, len(recorder.batches), accumulate):
        weights = []
        pairs = zip(recorder.batches[start : start + accumulate], recorder.observations[start:], strict=False)
        for batch, observation in pairs:
            log_ratio = observation.token_metrics["log_ratio"]
            sums = sequence_log_weights(log_ratio, batch.segments, len(batch.ids))
            weights.append(log_ratio.double() if level == "token" else sums)
        ratios.append(ess_ratio(torch.cat(weights)))
    return ratios


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_factor_is_the_root_of_the_ess_of_the_whole_optimizer_batch(tmp_path, model_path, level, accumulate):
    _, seen, recorder = run(tmp_path, model_path, ESSGuard(**{f"ess_{level}": 1.0}), accumulate)
    ratios = measured(recorder, level, accumulate)
    assert seen.phases == (["fresh"] * 2 + ["replay"] * 2) * 2
    for phase, factor, ratio in zip(seen.phases, seen.factors, ratios, strict=True):
        assert factor == (pytest.approx(math.sqrt(ratio), rel=1e-9) if phase == "replay" else 1.0)
    assert min(seen.factors) < 0.9, "the policy must have moved enough to matter"


def test_a_scaled_update_moves_adam_by_the_factor_and_restores_the_learning_rate(tmp_path, model_path):
    _, plain, _ = run(tmp_path / "plain", model_path, ESSGuard())
    trainer, scaled, _ = run(tmp_path / "scaled", model_path, ESSGuard(ess_sequence=1.0))
    # Both runs are one up to the first replay update, Adam's state included; beyond it they part.
    assert all(torch.equal(a, b) for a, b in zip(plain.moved[:2], scaled.moved[:2], strict=True))
    factor, distance = scaled.factors[2], float(plain.moved[2].norm())
    assert 0.05 < factor < 0.95
    assert distance > 0
    # Parameters are float32 of order 1, so that a displacement of 1e-2 is exact to about 1e-5.
    torch.testing.assert_close(scaled.moved[2], factor * plain.moved[2], rtol=1e-4, atol=1e-6)
    assert set(scaled.rates) == {1e-2}
    scalars = read_scalars(trainer.log_dir)
    assert scalars["replay/guarded"][-1] == (8, 4.0)
    assert scalars["replay/skipped"][-1] == (8, 0.0)
    means = [sum(scaled.factors[i] for i in pair) / 2 for pair in ((2, 3), (6, 7))]
    assert [value for _, value in scalars["update/replay/lr_factor"]] == pytest.approx(means)
    assert "update/fresh/lr_factor" not in scalars
    assert [value for _, value in scalars["update/learning_rate"]] == pytest.approx([1e-2, 1e-2])


def test_fillers_have_no_weights_that_the_guard_would_count(tmp_path, model_path):
    """Optimizer batches of 4 conversations as one micro-batch, and as 8, of which 4 are fillers."""
    fields = {"guard": ESSGuard(ess_sequence=1.0), "iterations": 1, "lr": 1.0, "optimizer": torch.optim.SGD}
    _, whole, _ = run(tmp_path / "1", model_path, **fields)
    _, split, recorder = run(tmp_path / "8", model_path, accumulate=8, **fields)
    assert sum(batch.is_filler for batch in recorder.batches) == len(recorder.batches) // 2
    assert split.factors == pytest.approx(whole.factors, rel=1e-3)
    assert whole.factors[-1] < 0.99, "the test is of no use if the policy stands still"


def test_the_clock_of_learning_rates_advances_by_the_rate_that_was_applied(tmp_path, model_path):
    trainer, seen, _ = run(tmp_path, model_path, ESSGuard(ess_sequence=1.0))
    assert min(seen.factors) < 0.95
    assert trainer.callbacks[0].clock.lr_path == pytest.approx(1e-2 * sum(seen.factors), rel=1e-12)


def test_a_schedule_goes_on_from_the_unscaled_rate(tmp_path, model_path):
    _, seen, _ = run(tmp_path, model_path, ESSGuard(ess_sequence=1.0), scheduler=slower)
    assert min(seen.factors) < 0.95
    assert seen.rates == pytest.approx([1e-2 * 0.9**step for step in range(1, 9)])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_the_guard_skips_leaves_everything_as_it_was(tmp_path, model_path, accumulate):
    watch = Watch()
    module = policy(model_path, guard=ESSGuard(ess_sequence=1.0, action="skip"), scheduler=slower)
    data = replay_data(replay_updates=1)
    trainer = fit(tmp_path, module, data, extra=(watch,), accumulate_grad_batches=accumulate)
    last = watch.unchanged[accumulate - 1 :: accumulate]
    assert [(phase, same) for phase, _, same in last] == (
        [("fresh", (False,) * 4)] * 2 + [("replay", (True,) * 4)] * 2
    ) * 2
    assert not any(skip for _, skip, _ in watch.unchanged), "the batches themselves were not empty"
    assert trainer.callbacks[0].clock.updates == 4
    scalars = read_scalars(trainer.log_dir)
    assert scalars["replay/skipped"] == [(2, 2.0), (4, 4.0)]
    assert scalars["replay/guarded"] == [(2, 2.0), (4, 4.0)]
    assert "update/replay/loss" not in scalars
    assert scalars["update/replay/lr_factor"] == [(2, 0.0), (4, 0.0)]
    assert all(0 < value < 1 for _, value in scalars["update/replay/ess_sequence"]), "it is what they were skipped for"


def test_a_gradient_that_was_dropped_is_in_no_later_update(tmp_path, model_path):
    """The fresh updates after a skipped replay are those of a run without replay."""
    _, guarded, _ = run(tmp_path / "guarded", model_path, ESSGuard(ess_token=1.0, action="skip"), accumulate=2)
    seen = Displacements()
    data = replay_data(replay_updates=0)
    fit(tmp_path / "plain", policy(model_path), data, extra=(seen,), accumulate_grad_batches=2)
    fresh = [moved for moved, phase in zip(guarded.moved, guarded.phases, strict=True) if phase == "fresh"]
    assert all(torch.equal(a, b) for a, b in zip(fresh, seen.moved, strict=True))


def test_nothing_is_guarded_above_the_threshold_or_without_one(tmp_path, model_path):
    trainer, seen, _ = run(tmp_path / "low", model_path, ESSGuard(ess_token=1e-6, action="skip"))
    assert set(seen.factors) == {1.0}
    assert read_scalars(trainer.log_dir)["replay/guarded"][-1][1] == 0
    trainer, seen, _ = run(tmp_path / "none", model_path, ESSGuard())
    assert set(seen.factors) == {1.0}
    assert "update/replay/lr_factor" not in read_scalars(trainer.log_dir)


def test_the_counts_go_on_in_a_resumed_run(tmp_path, model_path):
    guard = ESSGuard(ess_sequence=1.0)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, train_time_interval=timedelta(seconds=0))
    data = replay_data(replay_updates=1)
    fit(tmp_path / "first", policy(model_path, guard=guard), data, iterations=1, checkpoint=checkpoint)
    again = replay_data(replay_updates=1)
    resumed = fit(
        tmp_path / "second", policy(model_path, guard=guard), again, iterations=2, ckpt_path=tmp_path / "last.ckpt"
    )
    assert read_scalars(resumed.log_dir)["replay/guarded"] == [(8, 4.0)]


def test_learning_rates_are_restored_whatever_happens():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    rates = [0.5, torch.tensor(0.25)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0)

    def scaled_and_interrupted():
        with scaled_learning_rate(optimizer, 0.5):
            assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaled_and_interrupted()
    assert [group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True)] == [True, True]
