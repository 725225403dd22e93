from dataclasses import dataclass, field

import pytest
import torch
from lightning import Callback, Trainer

from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.errors import ConfigurationError, NonFiniteError
from freshper_lightning.replay import AbsoluteAdvantage
from freshper_lightning.rollout.collector import EnvironmentConfig
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback


def snapshot(trainer, module):
    """Copies of everything that an update may change: parameters, optimizer state, learning rate, clock."""
    optimizer = trainer.optimizers[0]
    tensors = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        tensors += [torch.as_tensor(value).clone() for value in optimizer.state.get(parameter, {}).values()]
    schedule = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    clock = next(c.clock for c in trainer.callbacks if isinstance(c, RolloutCallback))
    return tensors, optimizer.param_groups[0]["lr"], schedule, clock


def same(one, other):
    tensors = len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0]))
    return tensors, one[1] == other[1], one[2] == other[2], one[3] == other[3]


class Watch(Callback):
    """Says, of every micro-batch, what its step left as it was: parameters and optimizer, rate, schedule, clock."""

    def __init__(self):
        self.unchanged = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = snapshot(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.unchanged.append((batch.phase, batch.skip, same(self.before, snapshot(trainer, pl_module))))


def monitor_of(trainer) -> ReplayMonitor:
    return next(c for c in trainer.callbacks if isinstance(c, ReplayMonitor))


def slower(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_update_leaves_parameters_optimizer_schedule_and_clock_as_they_were(tmp_path, model_path, accumulate):
    watch, recorder = Watch(), Recorder()
    module = policy(model_path, scheduler=slower)
    data = replay_data(minimum_size=12, replay_updates=1)
    trainer = fit(tmp_path, module, data, extra=(watch, recorder), accumulate_grad_batches=accumulate)
    last = watch.unchanged[accumulate - 1 :: accumulate]
    fresh, skipped, replay = [("fresh", False)] * 2, [("replay", True)] * 2, [("replay", False)] * 2
    assert [seen[:2] for seen in last] == [*fresh, *skipped, *fresh, *replay]
    for _, skip, unchanged in last:
        assert unchanged == (skip,) * 4
    assert monitor_of(trainer).skipped == 2
    assert read_scalars(trainer.log_dir)["replay/skipped"] == [(2, 2.0), (6, 2.0)]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6
    assert all(batch.is_filler for batch in recorder.batches if batch.skip)


def test_equal_returns_give_no_gradient_and_nothing_to_replay_and_the_log_says_so(tmp_path, model_path, caplog):
    watch, recorder = Watch(), Recorder()
    rollout = rollout_callback(environment=EnvironmentConfig("tests/HashScore-v0", {"levels": 1}), format_penalty=0.0)
    data = replay_data(priority=AbsoluteAdvantage(eps=0.0))
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.1), scheduler=slower)
    trainer = fit(tmp_path, module, data, rollout=rollout, iterations=1, extra=(watch, recorder))
    assert [seen[:2] for seen in watch.unchanged] == [("fresh", False)] * 2 + [("replay", True)] * 4
    assert recorder.norms[:2] == [0.0, 0.0]
    assert all(float(seen.loss) == 0 for seen in recorder.observations)
    assert monitor_of(trainer).skipped == 4
    assert "all 8 advantages are 0" in caplog.text
    assert "there is nothing to learn from in this iteration" in caplog.text


@dataclass(frozen=True)
class Breaks(GRPO):
    """:class:`GRPO` whose loss, or whose gradient, is not finite at the micro-batch number ``BREAKS_AT``."""

    how: str = "loss"
    calls: list[None] = field(default_factory=list)

    def loss(self, inputs):
        output = super().loss(inputs)
        self.calls.append(None)
        if len(self.calls) == BREAKS_AT:
            zero = inputs.log_probs.sum() * 0
            output.loss = zero / 0 if self.how == "loss" else zero.sqrt()
        return output


BREAKS_AT = 6
"""With two micro-batches to an optimizer batch: the second half of the third one, the first of replay."""


@pytest.fixture(params=["loss", "gradient"])
def broken(request, tmp_path, model_path):
    """A run that has met a NaN; the objects, the error, and what the last good update left behind."""
    watch, recorder = Watch(), Recorder()
    module = policy(model_path, algorithm=Breaks(how=request.param), scheduler=slower)
    data = replay_data(replay_updates=1)
    with pytest.raises(NonFiniteError) as caught:
        fit(tmp_path, module, data, extra=(watch, recorder), accumulate_grad_batches=2)
    return tmp_path, module, data, watch, recorder, caught.value


def test_nan_stops_the_run_before_it_reaches_a_parameter(broken, request):
    _, module, _, watch, recorder, error = broken
    assert "replay batch" in str(error)
    assert "in epoch 0" in str(error)
    if "loss" in request.node.name:
        assert str(recorder.batches[-1].ids.tolist()) in str(error)
    assert all(torch.equal(now, then) for now, then in zip(module.parameters(), watch.before[0], strict=False))
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_nan_leaves_a_checkpoint_of_the_last_good_update_that_resumes(broken, model_path):
    folder, module, data, *_ = broken
    path = folder / "run" / "checkpoints" / "last_good.ckpt"
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())
    assert saved["callbacks"]["RolloutCallback"]["updates"] == 2
    for counts in ("current", "total"):
        assert set(saved["loops"]["fit_loop"]["epoch_loop.batch_progress"][counts].values()) == {4}
    recorder, again, restored = Recorder(), policy(model_path, scheduler=slower), replay_data(replay_updates=1)
    options = {"extra": (recorder,), "accumulate_grad_batches": 2, "ckpt_path": path}
    trainer = fit(folder / "resumed", again, restored, **options)
    replay, fresh = [("replay", 0)] * 4, [("fresh", 1)] * 4
    seen = [(batch.phase, clock.iteration - 1) for batch, clock in zip(recorder.batches, recorder.clocks, strict=True)]
    assert seen == [*replay, *fresh, *[("replay", 1)] * 4]
    assert trainer.callbacks[0].clock.updates == 8
    assert restored.buffer.ids()[:8].tolist() == data.buffer.ids().tolist()


class NoNumberIn(Callback):
    """Makes every update of an iteration fail."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.iteration:
            pl_module.temperature = float("nan")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_iteration_of_one_update_that_broke_is_trained_on_when_it_is_resumed(tmp_path, model_path, accumulate):
    options = {"iterations": 3, "accumulate_grad_batches": accumulate}
    with pytest.raises(NonFiniteError):
        fit(
            tmp_path,
            policy(model_path),
            replay_data(batch_size=8, epochs=1, replay_updates=0),
            extra=(NoNumberIn(1),),
            **options,
        )
    path, recorder = tmp_path / "run" / "checkpoints" / "last_good.ckpt", Recorder()
    data = replay_data(batch_size=8, epochs=1, replay_updates=0)
    trainer = fit(tmp_path / "resumed", policy(model_path), data, ckpt_path=path, extra=(recorder,), **options)
    assert [clock.iteration for clock in recorder.clocks] == [2] * accumulate + [3] * accumulate
    assert trainer.callbacks[0].clock.updates == 3


@pytest.mark.parametrize(("value", "finite"), [(3e38, True), (float("nan"), False), (-float("inf"), False)])
def test_one_element_that_is_not_finite_is_found(tmp_path, model_path, value, finite):
    module = policy(model_path)
    fit(tmp_path, module, replay_data(replay_updates=0), iterations=1)
    with torch.no_grad():
        for parameter in list(module.parameters())[:2]:
            parameter.view(-1)[-2:] = value  # two, whose sum is not finite
    assert module.has_finite_parameters() == finite


def test_settings_that_cannot_be_are_refused_by_key(model_path):
    with pytest.raises(ValueError, match=r"model\.temperature=0 must be above 0"):
        policy(model_path, temperature=0)


def test_a_micro_batch_that_is_too_large_is_refused_by_key_before_it_runs(tmp_path, model_path):
    recorder = Recorder()
    module = policy(model_path, max_micro_batch_tokens=160)
    with pytest.raises(
        ConfigurationError, match=r"model\.max_micro_batch_tokens=160.* takes \d+ tokens.*accumulate_grad_batches=1"
    ):
        fit(tmp_path, module, replay_data(batch_size=8, minimum_size=8), extra=(recorder,))
    assert recorder.observations == []
    with pytest.raises(ValueError, match=r"model\.max_micro_batch_tokens=0 must be at least 1"):
        policy(model_path, max_micro_batch_tokens=0)


def test_the_policy_is_loaded_by_the_trainer_and_not_before(model_path):
    module = policy(model_path)
    with pytest.raises(RuntimeError, match="configure_model"):
        module.policy  # noqa: B018


def test_the_policy_is_loaded_into_cpu_memory_whatever_device_lightning_makes_the_default_one(model_path):
    """Transformers takes a default device for a device map, and on a GPU would want another library for it."""
    module = policy(model_path)
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with torch.device("meta"):
        module.configure_model()
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_gradient_checkpointing_changes_no_gradient(tmp_path, model_path):
    norms = []
    for use in (False, True):
        recorder = Recorder()
        fit(tmp_path / str(use), policy(model_path, gradient_checkpointing=use), replay_data(), extra=(recorder,))
        norms.append(torch.tensor(recorder.norms))
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-6)
