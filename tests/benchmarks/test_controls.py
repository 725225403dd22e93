"""The controls do on purpose what the product avoids: each fault of the published code shows, and so do null steps."""

import numpy as np
import pytest
import torch

from benchmarks.controls import NullReplay, PublishedReplay, batch_advantages
from freshper_lightning.replay import AbsoluteReward, ExponentialDecay
from freshper_lightning.trajectory import ClockReading
from tests.loop import Recorder, fit, policy
from tests.replay.builders import make_trajectory


class Snapshots(Recorder):
    """Parameters after every update, and the learning rate that it was made with."""

    def __init__(self):
        super().__init__()
        self.parameters, self.states, self.rates = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        state = trainer.optimizers[0].state
        moments = [{k: v.clone() for k, v in state[p].items()} for p in pl_module.parameters() if p in state]
        self.parameters.append([p.detach().clone() for p in pl_module.parameters()])
        self.states.append(moments)


def run(folder, model_path, data, iterations=1, **fields):
    seen = Snapshots()
    module = policy(model_path, **fields)
    fit(folder, module, data, iterations=iterations, extra=(seen,), enable_checkpointing=False)
    return seen


def controlled(kind, **fields):
    return kind(**({"batch_size": 4, "replay_updates": 2, "beta_updates": 20, "seed": 3} | fields))


def test_a_null_update_moves_the_weights_by_momentum_alone(tmp_path, model_path):
    """An AdamW step on a gradient of 0, with bias corrections, worked out from the state before it."""
    seen = run(tmp_path, model_path, controlled(NullReplay), lr=1e-2)
    (first,) = [i for i, batch in enumerate(seen.batches) if batch.phase == "replay"][:1]
    for i in range(first, len(seen.batches)):
        assert float(seen.observations[i].loss) == 0 == seen.norms[i]
        for before, after, state in zip(seen.parameters[i - 1], seen.parameters[i], seen.states[i - 1], strict=True):
            step = float(state["step"]) + 1
            mean = 0.9 * state["exp_avg"] / (1 - 0.9**step)
            scale = (0.999 * state["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + 1e-8
            torch.testing.assert_close(after, before - 1e-2 * mean / scale, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(seen.parameters[first - 1], seen.parameters[-1], strict=True))


def test_a_null_update_without_momentum_moves_nothing_and_counts(tmp_path, model_path):
    seen = run(tmp_path, model_path, controlled(NullReplay), optimizer=torch.optim.SGD)
    phases = [batch.phase for batch in seen.batches]
    assert phases == ["fresh"] * 2 + ["replay"] * 4
    for later in seen.parameters[2:]:
        assert all(torch.equal(a, b) for a, b in zip(seen.parameters[1], later, strict=True))
    assert seen.clocks[-1].updates == 5


def returns(*values, groups):
    numbered = enumerate(zip(values, groups, strict=True))
    return [
        make_trajectory((value,), advantages=(0.5,), group=group, member=member) for member, (value, group) in numbered
    ]


def test_a_trajectory_drawn_without_its_group_or_twice_has_no_advantage():
    alone, twice, pair = 1.0, 0.7, (1.0, 0.0)
    found = batch_advantages(returns(alone, twice, twice, *pair, groups=[1, 2, 2, 3, 3]))
    np.testing.assert_allclose(found, [0, 0, 0, 1, -1], atol=1e-4)


def test_replayed_advantages_are_those_of_the_batch_and_not_those_of_collection(tmp_path, model_path):
    seen = run(tmp_path, model_path, controlled(PublishedReplay), iterations=3)
    replayed = [(batch, draw) for batch, draw in zip(seen.batches, seen.draws, strict=True) if batch.phase == "replay"]
    differ = 0
    for batch, draw in replayed:
        expected = dict(zip(draw.ids.tolist(), batch_advantages(draw.trajectories).tolist(), strict=True))
        own = torch.tensor([expected[i] for i in batch.ids.tolist()])[batch.segments]
        torch.testing.assert_close(batch.advantages, own.float())
        collected = torch.tensor([float(item.advantages[0]) for item in draw.trajectories])[batch.segments]
        differ += not torch.allclose(batch.advantages, collected, atol=1e-3)
    assert differ > len(replayed) / 2


def filled(**fields):
    """Two iterations of 4 trajectories, with returns 0 and 1, in the buffer of the control."""
    data = controlled(PublishedReplay, priority=AbsoluteReward(), alpha=1.0, clock="iterations", **fields)
    clock = [ClockReading(iteration=1)]
    data.bind(4, lambda: clock[0], 2)
    shares = []
    for iteration in (1, 2):
        clock[0] = ClockReading(updates=6 * iteration, iteration=iteration)
        data.add_fresh(returns(1.0, 0.0, 1.0, 0.0, groups=[iteration, iteration, 9, 9]))
        shares.append(data.buffer.probabilities(clock[0]))
    data.buffer.close()
    return shares


def test_new_trajectories_are_drawn_whatever_they_are_worth_until_the_next_refresh():
    first, second = filled(decay=ExponentialDecay(tau=10))
    np.testing.assert_allclose(first, np.full(4, 0.25))
    old = np.exp(-1 / 10) * np.array([1 + 1e-6, 1e-6, 1 + 1e-6, 1e-6])
    np.testing.assert_allclose(second, np.concatenate([old, np.ones(4)]) / (old.sum() + 4), rtol=1e-9)


def test_without_a_decay_priorities_are_never_written_and_replay_is_uniform():
    for shares in filled(decay="none"):
        np.testing.assert_allclose(shares, np.full(len(shares), 1 / len(shares)))


def test_age_is_counted_in_iterations_and_not_in_updates():
    _, second = filled(decay=ExponentialDecay(tau=1))
    assert second[0] / second[4] == pytest.approx(np.exp(-1), rel=1e-5)


def test_a_schedule_of_the_fresh_updates_goes_through_0_at_a_third_of_the_run_and_back(tmp_path, model_path):
    """4 iterations of 2 fresh updates are 24 updates with K = 2, on a cosine that is laid out for 8."""

    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

    seen = run(tmp_path, model_path, controlled(PublishedReplay), iterations=4, scheduler=cosine)
    rates = np.array(seen.rates) / 1e-2
    np.testing.assert_allclose(rates, (1 + np.cos(np.pi * np.arange(24) / 8)) / 2, atol=1e-9)
    assert (rates[8], rates[16]) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
