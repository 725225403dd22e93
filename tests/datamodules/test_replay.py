from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Callback, seed_everything

from datamodules.demonstrations import DemonstrationsDataModule
from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.replay import (
    AbsoluteAdvantage,
    AbsoluteReward,
    ExponentialDecay,
    HardAge,
    InverseDecay,
    NoDecay,
    UniformPriority,
    WholeGroups,
    WindowDecay,
)
from freshper_lightning.trajectory import ClockReading
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback
from tests.replay.builders import make_trajectory


class Gradients(Callback):
    """The whole gradient of each update, as one vector, before it is clipped."""

    def __init__(self):
        self.vectors = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.vectors.append(torch.cat([p.grad.flatten().double() for p in pl_module.parameters()]))


def merged(recorder, accumulate):
    """Id, weight and age of each trajectory of each optimizer batch, in the order of ids."""
    parts = []
    for start in range(0, len(recorder.batches), accumulate):
        batches = [batch for batch in recorder.batches[start : start + accumulate] if not batch.is_filler]
        columns = [torch.cat([getattr(b, n) for b in batches]) for n in ("ids", "importance_weights", "ages")]
        parts.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    return parts


@pytest.mark.parametrize(
    ("batch_size", "aggregation"), [(6, "token_mean"), (6, "sequence_mean"), (12, "sequence_sum"), (3, "token_mean")]
)
def test_draws_and_gradients_do_not_depend_on_accumulation(tmp_path, model_path, batch_size, aggregation):
    """A batch of 3 in 4 micro-batches has an empty one, a batch of 6 has unequal ones."""
    runs = []
    for accumulate in (1, 2, 4):
        recorder, gradients = Recorder(), Gradients()
        module = policy(model_path, lr=0.05, algorithm=GRPO(aggregation=aggregation), optimizer=torch.optim.SGD)
        options = {"rollout": rollout_callback(groups=3), "iterations": 1, "accumulate_grad_batches": accumulate}
        fit(
            tmp_path / str(accumulate),
            module,
            replay_data(batch_size=batch_size),
            **options,
            extra=(recorder, gradients),
        )
        runs.append((merged(recorder, accumulate), gradients.vectors))
    batches, vectors = runs[0]
    assert len(vectors) == 3 * 12 // batch_size
    for other_batches, other_vectors in runs[1:]:
        for mine, other in zip(batches, other_batches, strict=True):
            assert mine == other
        for mine, other in zip(vectors, other_vectors, strict=True):
            assert mine.norm() > 1e-3
            assert (mine - other).norm() <= 1e-6 * mine.norm()


class Ahead(Callback):
    """Looks at the buffer before a rollout and before each batch."""

    def __init__(self, data):
        self.data, self.seen = data, []

    def _look(self, when):
        self.seen.append((when, len(self.data.buffer), self.data.buffer.draws()))

    def on_train_start(self, trainer, pl_module):
        self._look("start")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._look(batch.phase)

    def on_train_epoch_end(self, trainer, pl_module):
        self._look("end")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_is_drawn_when_it_is_asked_for_and_not_before(tmp_path, model_path, accumulate):
    data = replay_data(batch_size=8, replay_updates=2)
    ahead = Ahead(data)
    fit(tmp_path, policy(model_path), data, extra=(ahead,), accumulate_grad_batches=accumulate)

    def iteration(size, draws):
        first, second = ("replay", size, draws + 1), ("replay", size, draws + 2)
        batches = [("fresh", size, draws), first, second]
        return [batch for batch in batches for _ in range(accumulate)] + [("end", size, draws + 2)]

    assert ahead.seen == [("start", 0, 0), *iteration(8, 0), *iteration(16, 2)]


@pytest.mark.parametrize("minimum_size", [None, 1000])
def test_every_iteration_has_the_same_number_of_batches_whether_or_not_it_can_draw(tmp_path, model_path, minimum_size):
    data, recorder = replay_data(epochs=2, replay_updates=3, minimum_size=minimum_size), Recorder()
    trainer = fit(tmp_path, policy(model_path), data, extra=(recorder,), accumulate_grad_batches=2)
    assert trainer.num_training_batches == len(data.train_dataloader()) == (2 + 3) * 2 * 2
    assert Counter(clock.iteration for clock in recorder.clocks) == {1: 20, 2: 20}
    ends = [index for index, batch in enumerate(recorder.batches) if batch.ends_iteration]
    assert ends == [19, 39]


def test_each_pass_takes_every_fresh_trajectory_once_and_in_another_order(tmp_path, model_path):
    data, recorder = replay_data(epochs=3, replay_updates=0), Recorder()
    fit(tmp_path, policy(model_path), data, extra=(recorder,))
    ids = [batch.ids.tolist() for batch in recorder.batches]
    passes = [ids[start] + ids[start + 1] for start in range(0, 12, 2)]
    assert [sorted(one) for one in passes] == [list(range(8))] * 3 + [list(range(8, 16))] * 3
    assert len({tuple(one) for one in passes}) == 6


def test_fresh_data_have_weight_one_and_the_age_of_the_updates_since(tmp_path, model_path):
    recorder = Recorder()
    fit(tmp_path, policy(model_path), replay_data(epochs=2, replay_updates=1), extra=(recorder,))
    fresh = [batch for batch in recorder.batches if batch.phase == "fresh"]
    assert [batch.ages.tolist() for batch in fresh] == [[float(age)] * 4 for age in (0, 1, 2, 3)] * 2
    assert all(batch.importance_weights.tolist() == [1.0] * 4 for batch in fresh)


def test_beta_goes_up_with_applied_updates_and_shapes_the_weights(tmp_path, model_path):
    data, recorder = replay_data(beta=0.2, beta_end=0.8, beta_updates=8), Recorder()
    fit(tmp_path, policy(model_path), data, extra=(recorder,))
    replay = [(c.updates, d, b) for c, d, b in zip(recorder.clocks, recorder.draws, recorder.batches, strict=True) if d]
    assert [updates for updates, _, _ in replay] == [2, 3, 4, 5, 8, 9, 10, 11]
    for updates, draw, batch in replay:
        beta = 0.2 + 0.6 * min(1, updates / 8)
        expected = (draw.probabilities.min() / draw.probabilities) ** beta
        np.testing.assert_allclose(draw.weights, expected, rtol=1e-12)
        assert batch.importance_weights.tolist() == torch.from_numpy(draw.weights).float().tolist()
    assert data.current_beta() == 0.8


def test_a_micro_batch_without_trajectories_is_a_filler_of_its_optimizer_batch(tmp_path, model_path):
    recorder = Recorder()
    data = replay_data(batch_size=2, replay_updates=1)
    fit(tmp_path, policy(model_path), data, extra=(recorder,), iterations=1, accumulate_grad_batches=4)
    for start in range(0, len(recorder.batches), 4):
        part = recorder.batches[start : start + 4]
        assert [batch.is_filler for batch in part] == [False, False, True, True]
        assert {batch.total_sequences for batch in part} == {2.0}
        assert not any(batch.skip for batch in part)
        assert [float(seen.loss) for seen in recorder.observations[start + 2 : start + 4]] == [0.0, 0.0]


def test_the_thread_changes_speed_and_nothing_else(tmp_path, model_path):
    runs = []
    for asynchronous in (False, True):
        recorder = Recorder()
        fit(tmp_path / str(asynchronous), policy(model_path), replay_data(asynchronous=asynchronous), extra=(recorder,))
        runs.append(recorder)
    for mine, other in zip(*(run.batches for run in runs), strict=True):
        assert mine.ids.tolist() == other.ids.tolist()
        assert mine.importance_weights.tolist() == other.importance_weights.tolist()
    assert [float(seen.loss) for seen in runs[0].observations] == [float(seen.loss) for seen in runs[1].observations]


def test_the_state_restores_content_and_what_is_fresh():
    data, other = (replay_data(batch_size=2, priority=UniformPriority()) for _ in range(2))
    for module in (data, other):
        module.bind(4, ClockReading)
    data.add_fresh([make_trajectory(advantages=(1.0,)) for _ in range(2)])
    data.add_fresh([make_trajectory(advantages=(float(i),), member=i) for i in range(4)])
    other.load_state_dict(data.state_dict())
    for update in range(data.updates_per_iteration):
        (mine,), (restored,) = data.optimizer_batch(update), other.optimizer_batch(update)
        assert mine.ids.tolist() == restored.ids.tolist()
        assert torch.equal(mine.input_ids, restored.input_ids)


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


def on_ranks(world_size, **fields):
    """A data module that its trainer has told the number of ranks; no process group is needed to be refused."""
    data = replay_data(**fields)
    data.trainer = SimpleNamespace(world_size=world_size, global_rank=0, accumulate_grad_batches=1)
    return data


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


DRAWS = {
    "stratified": "stratified",
    "gumbel": "gumbel",
    "groups": "groups",
    "groups by their best": WholeGroups("max"),
    "newest": "newest",
    "oldest": "oldest",
}


@pytest.mark.parametrize("draw", DRAWS)
def test_every_kind_of_draw_trains(tmp_path, model_path, draw):
    data, recorder = replay_data(draw=DRAWS[draw]), Recorder()
    fit(tmp_path, policy(model_path), data, extra=(recorder,))
    replayed = [batch for batch in recorder.batches if batch.phase == "replay"]
    assert len(replayed) == 8
    assert all(len(batch.ids) == 4 and not batch.skip for batch in replayed)
    assert all(torch.isfinite(seen.loss) for seen in recorder.observations)
    last = replayed[-1].ids.tolist()
    if draw == "newest":
        assert last == [12, 13, 14, 15]
    if draw == "oldest":
        assert last == [0, 1, 2, 3]
    if draw.startswith("groups"):
        assert {tuple(key // 4 for key in batch.ids.tolist()) for batch in replayed} <= {(g,) * 4 for g in range(4)}
    if draw != "stratified":
        assert all(len(set(batch.ids.tolist())) == 4 for batch in replayed)


def bound(group_size=4, size=4, **fields):
    """A data module without a trainer: one rank, one micro-batch."""
    data = replay_data(**fields)
    data.bind(size, ClockReading, group_size)
    return data


def test_ranks_with_equal_content_draw_with_random_numbers_of_their_own():
    drawn = []
    for rank in range(2):
        data = replay_data()
        data.trainer = SimpleNamespace(world_size=2, global_rank=rank)
        data.bind(4, ClockReading, 1)
        data.buffer.add(of_advantages(*range(1, 60)), ClockReading())
        drawn.append([data.buffer.sample(8, ClockReading(), beta=0.4).ids.tolist() for _ in range(3)])
    assert all(one != other for one, other in zip(*drawn, strict=True))


def of_advantages(*advantages, group=0):
    """The rewards are the advantages."""
    return [
        make_trajectory((float(value),), advantages=(float(value),), group=group, member=member)
        for member, value in enumerate(advantages)
    ]


@pytest.mark.parametrize("draw", DRAWS)
def test_an_update_is_skipped_where_there_is_too_little_to_draw_and_the_next_is_not(draw):
    data = bound(draw=DRAWS[draw], priority=AbsoluteAdvantage(eps=0.0))
    data.add_fresh(of_advantages(0, 0, 0, 0))
    (batch,) = data.optimizer_batch(1)
    assert batch.skip
    assert batch.is_filler
    assert (data.last_draw, data.effective_draw, data.buffer.draws()) == (None, 0.0, 0)
    data.add_fresh(of_advantages(1, 2, 0, 0, group=1))
    (batch,) = data.optimizer_batch(1)
    distinct = draw in ("gumbel", "newest", "oldest")
    assert batch.skip == distinct
    assert data.buffer.draws() == (0 if distinct else 1)
    data.add_fresh(of_advantages(1, 2, 3, 4, group=2))
    (batch,) = data.optimizer_batch(1)
    assert not batch.skip
    assert len(batch.ids) == 4
    total, squares = data.last_draw.weight_sums()
    assert data.effective_draw == total**2 / squares > 0


def test_nothing_is_drawn_before_the_buffer_has_its_minimum_size():
    data = bound(minimum_size=6)
    for skipped in (True, False):
        data.add_fresh(of_advantages(1, 2, 3, 4))
        assert data.optimizer_batch(1)[0].skip is skipped


def test_a_loss_divides_by_what_a_draw_from_one_buffer_would_have():
    """Without replacement a likely trajectory comes up once, and its tokens count for all the times it would have."""
    items = [make_trajectory((reward,), (tokens,), advantages=(reward,)) for reward, tokens in ((9.0, 8), (1.0, 1))]
    data = bound(size=2, batch_size=2, group_size=1, draw="gumbel", alpha=1.0, priority=AbsoluteReward(eps=0.0))
    data.add_fresh(items)
    for _ in range(3):
        (batch,) = data.optimizer_batch(1)
        lengths = np.array([item.num_sampled for item in data.last_draw.trajectories])
        assert batch.total_tokens == pytest.approx(float(lengths @ data.last_draw.multiplicities))
        assert batch.total_sequences == 2
    # Both are always drawn, so that P_i over the expected count of 1, times n, are the multiplicities.
    assert batch.total_tokens == pytest.approx(2 * (0.9 * 8 + 0.1 * 1), rel=1e-12)


def test_fresh_trajectories_are_pinned_while_they_are_trained_on():
    data = bound(capacity=6, eviction="lowest", priority=AbsoluteAdvantage(eps=0.0), epochs=2)
    data.add_fresh(of_advantages(0, 0, 0, 0))
    for more in ((5, 6), (7, 8)):  # from elsewhere, and worth more
        data.buffer.add(of_advantages(*more), ClockReading())
    assert data.buffer.pinned().tolist() == [0, 1, 2, 3]
    assert [sorted(data.optimizer_batch(update)[0].ids.tolist()) for update in (0, 1)] == [[0, 1, 2, 3]] * 2
    data.add_fresh(of_advantages(1, 1, 1, 1))
    assert data.buffer.pinned().tolist() == [8, 9, 10, 11]
    assert data.buffer.ids().tolist() == [6, 7, 8, 9, 10, 11]


def test_a_byte_budget_does_not_cost_what_is_still_to_be_trained_on():
    plain = bound()
    plain.add_fresh(of_advantages(1, 1, 1, 1))
    data = bound(max_bytes=plain.buffer.nbytes + 10)
    data.add_fresh(of_advantages(1, 1, 1, 1))
    with pytest.raises(ValueError, match="all that is left is pinned"):
        data.buffer.add(of_advantages(1), ClockReading())
    data.add_fresh(of_advantages(1, 1, 1, 1))
    assert data.buffer.ids().tolist() == [4, 5, 6, 7]


def test_pins_are_those_of_the_run_that_was_saved_in_the_middle_of_an_iteration():
    data, other = (bound(capacity=6, eviction="lowest", priority=AbsoluteAdvantage(eps=0.0)) for _ in range(2))
    data.add_fresh(of_advantages(0, 0, 0, 0))
    data.optimizer_batch(0), data.optimizer_batch(1)
    other.load_state_dict(data.state_dict())
    assert other.buffer.pinned().tolist() == [0, 1, 2, 3]
    for module in (data, other):
        module.add_fresh(of_advantages(1, 0, 2, 0))
        module.buffer.add(of_advantages(3, 4), ClockReading())
    assert data.buffer.pinned().tolist() == other.buffer.pinned().tolist() == [4, 5, 6, 7]
    assert data.buffer.ids().tolist() == other.buffer.ids().tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("damage", ["fresh", "buffer"])
def test_a_damaged_state_is_refused(damage):
    data, other = bound(), bound()
    data.add_fresh(of_advantages(1, 2, 3, 4))
    state = data.state_dict()
    if damage == "fresh":
        state["fresh"] = state["fresh"] + 1
    else:
        state["buffer"]["columns"]["since"] = state["buffer"]["columns"]["since"][:-1]
    with pytest.raises(ConfigurationError, match="damaged"):
        other.load_state_dict(state)


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
