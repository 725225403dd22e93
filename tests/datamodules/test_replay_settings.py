"""What the settings of replay must be, by themselves and beside the sizes of an iteration."""

import numpy as np
import pytest
from lightning import seed_everything

from datamodules.demonstrations import DemonstrationsDataModule
from datamodules.replay import ReplayDataModule
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.replay import (
    ExponentialDecay,
    HardAge,
    InverseDecay,
    NoDecay,
    TDError,
    WholeGroups,
    WindowDecay,
)
from freshper_lightning.trajectory import ClockReading
from tests.datamodules.modules import bound, of_advantages, on_ranks
from tests.loop import replay_data
from tests.replay.builders import make_trajectory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size=0 must be at least 1"),
        ({"epochs": -1}, r"data\.epochs=-1 must be at least 0"),
        ({"replay_updates": -2}, r"data\.replay_updates=-2 must be at least 0"),
        ({"epochs": 0, "replay_updates": 0}, r"data\.epochs=0 must be at least 1 where replay_updates is 0"),
        ({"beta": 1.5}, r"data\.beta=1\.5 must be in \[0, 1\]"),
        ({"beta": float("nan")}, r"data\.beta=nan must be in \[0, 1\]"),
        ({"beta_end": -0.1}, r"data\.beta_end=-0\.1 must be in \[0, 1\]"),
        ({"beta_updates": 0}, r"data\.beta_updates=0 must be at least 1"),
        ({"capacity": 0}, r"data\.capacity must be at least 1, not 0"),
        ({"minimum_size": 0}, r"data\.minimum_size=0 must be at least 1"),
        ({"decay": "exponential"}, r"data\.decay='exponential' must be none \(or null\), or a Decay: ExponentialDecay"),
        ({"decay": "None"}, r"data\.decay='None' must be none"),
        ({"decay": 50.0}, r"data\.decay=50\.0 must be none"),
        ({"alpha": 2.0}, r"alpha must be in \[0, 1\], not 2\.0"),
        ({"max_bytes": 0}, r"max_bytes must be at least 1.*, not 0"),
        (
            {"clock": "seconds"},
            r"clock must be one of updates, iterations, lr_path, drift, drift_length, not 'seconds'",
        ),
        ({"seed": -1}, r"seed must be at least 0, not -1"),
        ({"draw": "uniform"}, r"data\.draw must be one of stratified, gumbel, groups, newest, oldest.*, not 'uniform'"),
        ({"eviction": "lifo"}, r"data\.eviction must be one of fifo, lowest.*, not 'lifo'"),
        ({"weights": "mean"}, r"data\.weights must be one of max, sum, not 'mean'"),
        ({"log_prob_dtype": "int8"}, r"data\.log_prob_dtype must be one of float32, float16, not 'int8'"),
        (
            {"memory_map": "no/such/folder"},
            r"data\.memory_map must be an existing folder, or none, not 'no/such/folder'",
        ),
    ],
)
def test_an_impossible_setting_is_refused_with_key_value_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        ReplayDataModule(**fields)


def test_sizes_that_do_not_fit_an_iteration_are_refused():
    with pytest.raises(ValueError, match=r"data\.batch_size=5 must divide rollout\.groups x rollout\.group_size = 8"):
        replay_data(batch_size=5).bind(8, ClockReading)
    with pytest.raises(ValueError, match=r"data\.capacity=6 must be at least one iteration \(8\)"):
        replay_data(batch_size=4, capacity=6).bind(8, ClockReading)
    with pytest.raises(
        ValueError, match=r"data\.batch_size=4 on 1 rank.*multiple of rollout\.group_size=8.*WholeGroups"
    ):
        replay_data(draw="groups").bind(8, ClockReading, group_size=8)
    with pytest.raises(ValueError, match=r"data\.draw\.size=2 must be rollout\.group_size=4, or left out"):
        replay_data(draw=WholeGroups("max", size=2)).bind(8, ClockReading, group_size=4)


def test_capacity_is_that_of_each_rank_and_sizes_are_those_of_all():
    data = on_ranks(8, batch_size=512, capacity=64, minimum_size=512)
    data.bind(512, ClockReading)
    assert data.batches_per_epoch == 1
    with pytest.raises(
        ConfigurationError, match=r"data\.capacity=63 must be .*\(512, of which each of 8 ranks holds 64"
    ):
        on_ranks(8, batch_size=512, capacity=63).bind(512, ClockReading)
    with pytest.raises(
        ConfigurationError, match=r"data\.minimum_size=513 must be at most data\.capacity x ranks = 512"
    ):
        on_ranks(8, batch_size=512, capacity=64, minimum_size=513).bind(512, ClockReading)
    with pytest.raises(ConfigurationError, match=r"data\.minimum_size=20000 must be at most .* = 10000"):
        replay_data(minimum_size=20_000).bind(8, ClockReading)


def test_a_byte_budget_below_that_of_one_iteration_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"data\.max_bytes=10 must be at least \d+, for 8 trajectories.*160 tokens"
    ):
        replay_data(max_bytes=10).bind(8, ClockReading, longest=160)
    with pytest.raises(ConfigurationError, match=r"data\.max_bytes=16383 must be .* 2 trajectories"):
        on_ranks(4, max_bytes=4 * 4096 - 1).bind(8, ClockReading, longest=4096)
    data = replay_data(batch_size=1, minimum_size=1, max_bytes=4 * 160 + 400)
    data.bind(1, ClockReading, longest=160)
    data.add_fresh(of_advantages(1))


@pytest.mark.parametrize("clock", ["lr_path", "drift", "drift_length"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"data\.decay\.tau=50\.0, the default, is meant for updates"),
        ({"decay": ExponentialDecay()}, r"data\.decay\.tau=50\.0"),
        ({"decay": WindowDecay()}, r"data\.decay\.max_age=100\.0, the default"),
        ({"decay": "none", "eviction": HardAge()}, r"data\.eviction\.max_age=100\.0, the default"),
    ],
)
def test_an_age_that_is_meant_for_updates_is_refused_with_clocks_that_never_reach_it(clock, fields, message):
    with pytest.raises(ConfigurationError, match=message + rf".*data\.clock={clock} .*: 50 x .* like 50 updates"):
        ReplayDataModule(clock=clock, **fields)


@pytest.mark.parametrize("clock", ["lr_path", "drift", "drift_length"])
def test_an_age_of_its_own_is_taken_with_every_clock(clock):
    for decay in (ExponentialDecay(0.02), WindowDecay(0.02), InverseDecay(), NoDecay(), "none", None):
        assert ReplayDataModule(clock=clock, decay=decay, eviction=HardAge(0.1)).buffer.clock == clock
    for updates in ("updates", "iterations"):
        assert ReplayDataModule(clock=updates, eviction=HardAge()).buffer.decay == ExponentialDecay(50.0)


def test_whole_groups_have_the_size_that_rollouts_have_on_every_rank():
    """The largest group that happens to be stored may differ between ranks."""
    for ranks in (1, 2):
        data = on_ranks(ranks, draw="groups", batch_size=8)
        data.bind(8, ClockReading, group_size=4)
        assert data.buffer.scheme == WholeGroups(size=4)
    with pytest.raises(ConfigurationError, match=r"data\.batch_size=8 on 4 rank\(s\) must be a multiple of"):
        on_ranks(4, draw="groups", batch_size=8).bind(8, ClockReading, group_size=4)


def test_the_seed_is_that_of_the_run_unless_one_is_given(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "")  # restored at the end
    seed_everything(7)
    made = [ReplayDataModule(), ReplayDataModule(seed=0), ReplayDataModule(seed=9)]
    assert [data.seed for data in made] == [data.buffer.seed for data in made] == [7, 0, 9]
    assert DemonstrationsDataModule(lambda seed: [("q", "a")]).seed == 7
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert ReplayDataModule().seed == 0


def test_a_data_module_that_nobody_told_the_size_of_an_iteration_says_so():
    with pytest.raises(RuntimeError, match="RolloutCallback"):
        len(replay_data().train_dataloader())


def test_settings_reach_the_buffer(tmp_path):
    plain = bound()
    other = bound(weights="sum", log_prob_dtype="float16", memory_map=str(tmp_path), beta=1.0)
    items = [make_trajectory((1.0,), (300,), advantages=(float(value),)) for value in (1, 2, 3, 4)]
    for data in (plain, other):
        data.add_fresh(items)
        data.optimizer_batch(1)
    assert plain.last_draw.weights.max() == 1.0
    assert other.last_draw.weights.mean() == pytest.approx(1.0)
    assert plain.buffer.nbytes - other.buffer.nbytes == 4 * 2 * 300
    assert isinstance(other.buffer._content.store._arena._segments[0].buffer.base, np.memmap)


def test_a_module_that_is_bound_anew_forgets_what_followed_drift():
    data = bound()
    data.bind_freshness(lambda items: items[:1], restores_tau=True, rewrites_freshness=True)
    data.add_fresh(of_advantages(1, 2, 3, 4))
    assert len(data.buffer) == 1
    state = data.state_dict() | {"tau": 7.0}
    data.load_state_dict(state)
    assert data.buffer.decay == ExponentialDecay(7.0)
    data.bind(4, ClockReading)
    data.add_fresh(of_advantages(1, 2, 3, 4))
    assert len(data.buffer) == 5
    assert not data.rewrites_freshness
    data.load_state_dict(state | {"tau": 9.0})
    assert data.buffer.decay == ExponentialDecay(7.0)


def test_priorities_that_the_buffer_cannot_tell_are_those_that_were_bound():
    data = replay_data(priority=TDError())
    data.bind(4, ClockReading, measure=lambda items: np.arange(1.0, 1.0 + len(items)))
    data.add_fresh(of_advantages(0, 0, 0, 0))
    assert data.buffer.bases(data.buffer.ids()).tolist() == pytest.approx([1.0, 2.0, 3.0, 4.0])
