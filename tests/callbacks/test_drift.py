"""The clocks of a real run: drift against the same number computed here from copies of the policy."""

import logging
import math
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.algorithms.losses import k3
from freshper_lightning.callbacks.drift import PROBE_SHARE, beginning, choose_probe, mean_drift
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.errors import NumericsError
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.replay import ExponentialDecay
from freshper_lightning.rollout.sampling import SamplingConfig
from freshper_lightning.trajectory import ClockReading
from tests.loop import fit, policy, replay_data, rollout_callback
from tests.policy.transcripts import alone
from tests.replay.builders import make_trajectory

LR = 1e-2
UPDATES = 6
"""Of an iteration: 2 on fresh and 4 on replayed data."""


def drift_data(**fields):
    return replay_data(**({"clock": "drift", "decay": ExponentialDecay(tau=1.0)} | fields))


@dataclass
class Diary(Callback):
    """Clock, fresh trajectories and weights after every optimizer batch, and how often the policy was run."""

    clocks: list = field(default_factory=list)
    fresh: list = field(default_factory=list)
    weights: list = field(default_factory=list)
    forwards: int = 0

    def on_train_start(self, trainer, pl_module):
        self.weights.append(copied(pl_module))
        pl_module.policy.register_forward_hook(self._count)

    def _count(self, *_):
        self.forwards += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.clocks.append(trainer.callbacks[0].clock)
            self.fresh.append(trainer.datamodule.fresh())
            self.weights.append(copied(pl_module))


def copied(module):
    return {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


def run(folder, model, data, lr=LR, optimizer=torch.optim.AdamW, temperature=1.0, module=None, **fields):
    diary = Diary()
    sampling = SamplingConfig(max_tokens=6, temperature=temperature)
    rollout = rollout_callback(sampling=sampling, **fields.pop("rollout", {}))
    module = module or policy(model, lr=lr, optimizer=optimizer, temperature=temperature)
    trainer = fit(folder, module, data, extra=(diary,), rollout=rollout, **fields)
    return diary, trainer


@pytest.fixture(scope="module")
def seen(tmp_path_factory, model_path):
    """Two iterations under the clock of drift, at a temperature that is not 1."""
    return run(tmp_path_factory.mktemp("drift"), model_path, drift_data(), temperature=0.7)


def drifts(diary):
    readings = [ClockReading(), *diary.clocks]
    return [after.drift - before.drift for before, after in pairwise(readings)]


def test_drift_is_the_mean_over_the_probe_of_each_update_at_the_sampling_temperature(seen, model_path):
    diary, _ = seen
    net = PolicyNet.from_pretrained(model_path)
    for update, measured in enumerate(drifts(diary)):
        probe = choose_probe(diary.fresh[update], 2, seed=3)
        sides = []
        for weights in diary.weights[update : update + 2]:
            net.load_state_dict(weights)
            sides.append(torch.cat([alone(net, item, temperature=0.7)[0] for item in probe]))
        ratio = (sides[1] - sides[0]).exp()
        assert measured == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-3)
        assert measured > 0


def test_a_probability_that_doubles_and_one_that_halves_drift_by_a_quarter_of_a_nat():
    """(2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2."""
    terms = k3(torch.tensor([0.2, 0.6]).double().log() - torch.tensor([0.1, 1.2]).double().log())
    assert mean_drift(float(terms.sum()), len(terms)) == pytest.approx(0.25, rel=1e-6)


def test_every_clock_advances_with_the_update_that_moves_it(seen):
    diary, _ = seen
    assert [clock.updates for clock in diary.clocks] == list(range(1, 2 * UPDATES + 1))
    length, lr_path = 0.0, 0.0
    for drift, clock in zip(drifts(diary), diary.clocks, strict=True):
        length, lr_path = length + math.sqrt(2 * drift), lr_path + LR
        assert clock.drift_length == pytest.approx(length, rel=1e-9)
        assert clock.lr_path == pytest.approx(lr_path, rel=1e-12)


def test_trajectories_are_born_and_aged_in_drift(seen):
    diary, trainer = seen
    buffer, last = trainer.datamodule.buffer, diary.clocks[-1]
    births = [item.born.drift for item in buffer.get(buffer.ids())]
    assert births == [0.0] * 8 + [diary.clocks[UPDATES - 1].drift] * 8
    assert buffer.ages(last).tolist() == [last.drift - birth for birth in births]


def test_drift_is_in_the_logs(seen):
    diary, trainer = seen
    scalars = read_scalars(trainer.log_dir)
    for name in ("drift", "drift_length", "lr_path"):
        expected = [getattr(diary.clocks[end], name) for end in (UPDATES - 1, 2 * UPDATES - 1)]
        assert [value for _, value in scalars[f"replay/{name}"]] == pytest.approx(expected, rel=1e-6)
    means = [sum(drifts(diary)[start : start + UPDATES]) / UPDATES for start in (0, UPDATES)]
    assert [value for _, value in scalars["replay/drift_per_update"]] == pytest.approx(means, rel=1e-6)
    assert all(value > 0 for _, value in scalars["time/drift"])
    buckets = {tag.rpartition("/")[2] for tag in scalars if tag.startswith("ess_by_age/")}
    assert "0-1e-05" in buckets, "age 0"
    assert buckets & {"0.1-1", "1-inf"}, "replayed data"
    assert not buckets & {"0-1", "1-10"}, "these are of a clock that counts"


def test_an_iteration_costs_one_forward_of_the_probe_and_one_more_for_each_update(seen):
    diary, _ = seen
    assert diary.forwards == 2 * UPDATES + 2 * (1 + UPDATES)


def test_nothing_is_forwarded_where_nobody_asks_for_drift(tmp_path, model_path):
    diary, trainer = run(tmp_path, model_path, replay_data(clock="lr_path", decay=ExponentialDecay(1.0)), iterations=1)
    assert diary.forwards == UPDATES
    assert (diary.clocks[-1].drift, diary.clocks[-1].updates) == (0.0, UPDATES)
    scalars = read_scalars(trainer.log_dir)
    assert not [tag for tag in scalars if "drift" in tag]
    assert "replay/lr_path" in scalars


def test_drift_can_be_measured_beside_another_clock_and_changes_nothing_else(tmp_path, model_path):
    plain, _ = run(tmp_path / "plain", model_path, replay_data(), iterations=1)
    fields = {"rollout": {"measure_drift": True}, "iterations": 1}
    measured, trainer = run(tmp_path / "measured", model_path, replay_data(), **fields)
    assert measured.clocks[-1].drift > 0 == plain.clocks[-1].drift
    assert read_scalars(trainer.log_dir)["replay/drift"][0][1] > 0
    for mine, other in zip(plain.weights, measured.weights, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_with_learning_rate_zero_there_is_no_drift_at_all(tmp_path, model_path):
    diary, _ = run(tmp_path, model_path, drift_data(), lr=0.0)
    assert diary.clocks[-1] == ClockReading(updates=2 * UPDATES, iteration=2)


def test_a_skipped_update_moves_no_clock_and_costs_no_forward_of_the_probe(tmp_path, model_path):
    diary, _ = run(tmp_path, model_path, drift_data(minimum_size=1000), iterations=1)
    assert [clock.updates for clock in diary.clocks] == [1, 2, 2, 2, 2, 2]
    assert len(set(diary.clocks)) == 2
    assert diary.forwards == UPDATES + 1 + 2


def test_drift_does_not_depend_on_accumulation(tmp_path, model_path):
    runs = [
        run(tmp_path / str(m), model_path, drift_data(), lr=0.1, optimizer=torch.optim.SGD, accumulate_grad_batches=m)
        for m in (1, 2)
    ]
    (one, _), (other, _) = runs
    assert drifts(one) == pytest.approx(drifts(other), rel=1e-2)
    assert min(drifts(one)) > 0


def test_the_path_of_learning_rates_follows_the_schedule_of_applied_updates(tmp_path, model_path):
    halving = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda update: 0.5**update)
    module = policy(model_path, lr=LR, scheduler=halving)
    diary, _ = run(
        tmp_path, model_path, replay_data(clock="lr_path", decay=ExponentialDecay(1.0), minimum_size=9), module=module
    )
    rates = [LR * 0.5**update for update in range(2 + UPDATES)]
    sums = torch.tensor(rates, dtype=torch.float64).cumsum(0).tolist()
    assert [clock.lr_path for clock in diary.clocks] == pytest.approx(sums[:2] + 4 * [sums[1]] + sums[2:], rel=1e-12)


@pytest.mark.parametrize("clock", ["drift", "lr_path"])
def test_a_run_that_is_resumed_anywhere_reads_the_same_clocks_bit_for_bit(tmp_path, model_path, clock):
    """In fresh data, in replay, and at the border of iterations."""
    every = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _ = run(tmp_path / "whole", model_path, drift_data(clock=clock), checkpoint=every)
    for step in (1, 4, UPDATES, UPDATES + 1):
        path = tmp_path / "kept" / f"step={step}.ckpt"
        resumed, _ = run(tmp_path / str(step), model_path, drift_data(clock=clock), ckpt_path=path)
        assert resumed.clocks == whole.clocks[step:]
        for mine, other in zip(resumed.weights[1:], whole.weights[step + 1 :], strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_checkpoint_of_before_there_were_these_clocks_starts_them_at_0():
    rollout = rollout_callback()
    rollout.load_state_dict({"updates": 7, "iteration": 2, "environment_steps": 30})
    assert rollout.clock == ClockReading(updates=7, iteration=2)
    other = rollout_callback()
    rollout.clock = rollout.clock.after_update(1 / 3, 1 / 7)
    other.load_state_dict(rollout.state_dict())
    assert (other.clock, other.environment_steps) == (rollout.clock, 30)


groups = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(1, 4), st.integers(0, 9), st.randoms())
def test_a_probe_is_a_sixteenth_of_a_batch_in_whatever_order_trajectories_come(lengths, batches, seed, random):
    items = [
        make_trajectory(rewards=(0.0,) * len(turns), turn_tokens=tuple(turns), group=i // 4, member=i % 4)
        for i, turns in enumerate(lengths)
    ]
    probe, sampled = choose_probe(items, batches, seed), sum(item.num_sampled for item in items)
    assert sum(item.num_sampled for item in probe) == max(1, sampled // (PROBE_SHARE * batches))
    random.shuffle(items)
    again = choose_probe(items, batches, seed)
    assert [item.token_ids.tolist() for item in probe] == [item.token_ids.tolist() for item in again]


def test_a_long_trajectory_is_as_likely_to_be_in_a_probe_as_a_short_one():
    """The budget is 32 tokens: a probe that begins with a long trajectory has nothing else."""
    lengths = [5] * 24 + [50] * 8
    items = [make_trajectory(turn_tokens=(n,), group=i) for i, n in enumerate(lengths)]
    long = [choose_probe(items, 1, seed)[0].num_sampled == 32 for seed in range(400)]
    assert sum(long) / 400 == pytest.approx(8 / 32, abs=0.08)


def test_the_beginning_of_a_conversation_ends_with_a_sampled_token():
    item = make_trajectory(rewards=(0.0, 0.0), turn_tokens=(2, 3))
    assert item.turns.tolist() == [[1, 3], [4, 7]]
    for sampled, end, turns in ((1, 2, [[1, 2]]), (2, 3, [[1, 3]]), (3, 5, [[1, 3], [4, 5]]), (9, 7, [[1, 3], [4, 7]])):
        part = beginning(item, sampled)
        assert (part.num_tokens, part.turns.tolist()) == (end, turns)
        assert part.token_ids.tolist() == item.token_ids[:end].tolist()


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_a_policy_that_has_run_away_stops_the_run(total):
    with pytest.raises(NumericsError, match=r"moved the policy by (inf|nan) nats on 5 tokens"):
        mean_drift(total, 5.0)


def test_without_any_fresh_token_the_clock_stands_still_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert mean_drift(0.0, 0.0) == 0.0
    assert "no fresh trajectory" in caplog.text
