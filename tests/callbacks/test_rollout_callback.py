from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning import Callback

from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import LAST
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.seeds import training_instance_seed
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback
from tests.replay.builders import assert_same


@dataclass
class Finished:
    trainer: object
    data: object
    recorder: Recorder

    @property
    def items(self):
        return self.data.buffer.get(self.data.buffer.ids())


def run(folder, model, iterations=2, data=None, extra=(), lr=1e-2, **fields) -> Finished:
    recorder, data = Recorder(), data or replay_data()
    options = {"rollout": rollout_callback(**fields), "iterations": iterations, "extra": (recorder, *extra)}
    return Finished(fit(folder, policy(model, lr=lr), data, **options), data, recorder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_path):
    return run(tmp_path_factory.mktemp("run"), model_path, groups=3, group_size=4)


def test_members_of_a_group_share_an_instance_and_groups_do_not(finished):
    seeds = {}
    for item in finished.items:
        seeds.setdefault(item.group, set()).add(item.seed)
    assert sorted(seeds) == list(range(6)), "groups of the second iteration are other groups"
    assert all(len(own) == 1 for own in seeds.values())
    assert len(set.union(*seeds.values())) == 6
    for group, own in seeds.items():
        assert own == {training_instance_seed(3, 1 + group // 3, group % 3)}
    assert [item.member for item in finished.items] == list(range(4)) * 6


def test_members_of_a_group_play_differently(finished):
    first = [item.token_ids.tolist() for item in finished.items[:4]]
    assert len({tuple(tokens) for tokens in first}) > 1


def test_the_clock_counts_rollout_phases_and_applied_updates(finished):
    assert [(clock.iteration, clock.updates) for clock in finished.recorder.clocks] == [
        *((1, updates) for updates in range(9)),
        *((2, updates) for updates in range(9, 18)),
    ]
    assert {(item.born.iteration, item.born.updates) for item in finished.items} == {(1, 0), (2, 9)}


def test_each_turn_says_which_weights_sampled_it(finished):
    for item in finished.items:
        assert item.weight_versions.tolist() == [item.born.updates] * item.num_turns


def test_a_rollout_is_a_function_of_weights_seed_and_clock_alone(tmp_path, model_path, finished):
    """Global random state, and what else the engine has played in between, do not matter."""
    torch.manual_seed(12345)
    again = run(tmp_path / "again", model_path, groups=3, group_size=4)
    for mine, other in zip(finished.items, again.items, strict=True):
        assert_same(mine, other)
    other = run(tmp_path / "other", model_path, iterations=1, groups=3, group_size=4, seed=4)
    assert {item.seed for item in other.items}.isdisjoint({item.seed for item in finished.items})


def test_the_engine_gets_the_policy_of_the_moment(tmp_path, model_path):
    class Compare(Callback):
        gaps = ()

        def on_train_epoch_start(self, trainer, pl_module):
            engine = callback_of(trainer, RolloutCallback).engine
            own = sum(float(p.detach().double().abs().sum()) for p in pl_module.parameters())
            self.gaps = (*self.gaps, abs(engine.weight_fingerprint() / own - 1))

    compare = Compare()
    run(tmp_path, model_path, iterations=3, extra=(compare,))
    assert len(compare.gaps) == 3
    assert max(compare.gaps) < 1e-9


def test_format_penalties_are_part_of_the_training_return_and_not_of_the_score(finished):
    assert any(item.invalid_turns for item in finished.items)
    for item in finished.items:
        assert item.format_penalty == -0.25 * item.invalid_turns
        assert item.episode_return == float(item.rewards.double().sum())
        assert item.training_return == item.episode_return + item.format_penalty


def test_a_group_that_its_environment_lost_is_left_out_and_the_run_goes_on(tmp_path, model_path):
    environment = EnvironmentConfig("tests/HashScore-v0", {"fails_every": 3})
    lost = run(tmp_path, model_path, environment=environment, groups=6, max_failure_share=0.9)
    kept = {item.group for item in lost.items}
    assert 0 < len(kept) < 12
    assert len(lost.items) == 4 * len(kept)
    assert all(item.seed // 2 % 3 for item in lost.items)
    assert len(lost.recorder.batches) == 2 * (1 + 2) * 6
    failures = read_scalars(lost.trainer.log_dir)["rollout/failures"]
    assert sum(value for _, value in failures) == 4 * (12 - len(kept))


def test_groups_have_names_of_their_own_though_a_resumed_run_has_fewer_per_iteration(tmp_path, model_path):
    first = run(tmp_path, model_path, groups=4)
    last, data = Path(first.trainer.log_dir) / "checkpoints" / LAST, replay_data()
    fit(tmp_path, policy(model_path), data, ckpt_path=last, iterations=4, rollout=rollout_callback(groups=2))
    groups = [item.group for item in data.buffer.get(data.buffer.ids())]
    assert sorted(groups) == sorted([*range(12)] * 4)


def test_updates_without_any_fresh_trajectory_are_skipped(tmp_path, model_path):
    """More batches than trajectories are left: the surplus updates have nothing to train on."""
    environment = EnvironmentConfig("tests/HashScore-v0", {"fails_every": 3})
    fields = {"environment": environment, "groups": 6, "group_size": 2, "max_failure_share": 0.9}
    lost = run(tmp_path, model_path, iterations=1, data=replay_data(batch_size=1, replay_updates=0), **fields)
    skipped = [batch.skip for batch in lost.recorder.batches]
    assert len(skipped) == 12
    assert skipped.count(False) == len(lost.items) < 12
    assert callback_of(lost.trainer, ReplayMonitor).skipped == skipped.count(True)
    assert callback_of(lost.trainer, RolloutCallback).clock.updates == len(lost.items)


def test_too_many_failures_stop_the_run(tmp_path, model_path):
    environment = EnvironmentConfig("tests/HashScore-v0", {"fails_every": 1})
    with pytest.raises(RuntimeError, match=r"max_failure_share"):
        run(tmp_path, model_path, environment=environment)


def test_the_engine_is_closed_when_the_run_is_over(finished):
    assert callback_of(finished.trainer, RolloutCallback).engine is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 0}, r"rollout\.groups=0 must be at least 1"),
        ({"group_size": -1}, r"rollout\.group_size=-1 must be at least 1"),
        ({"format_penalty": 0.5}, r"rollout\.format_penalty=0\.5 must be finite and at most 0"),
        ({"max_failure_share": 1.0}, r"rollout\.max_failure_share=1\.0 must be in \[0, 1\)"),
    ],
)
def test_an_impossible_setting_is_refused_by_key(fields, message):
    with pytest.raises(ValueError, match=message):
        rollout_callback(**fields)
