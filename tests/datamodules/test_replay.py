"""The batches of a run: when they are drawn, what they hold, and that their split changes nothing."""

from collections import Counter

import numpy as np
import pytest
import torch
from lightning import Callback

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.algorithm import GRPO
from tests.datamodules.modules import DRAWS
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback


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


@pytest.mark.parametrize(("fields", "beta"), [({}, 0.0), ({"beta": 0.7}, 0.7)])
def test_beta_is_zero_unless_it_is_set_and_constant_unless_it_has_an_end(tmp_path, model_path, fields, beta):
    data, recorder = ReplayDataModule(batch_size=4, replay_updates=1, beta_updates=3, seed=3, **fields), Recorder()
    fit(tmp_path, policy(model_path), data, extra=(recorder,))
    assert data.current_beta() == beta
    draws = [draw for draw in recorder.draws if draw]
    assert len(draws) == 4
    for draw in draws:
        np.testing.assert_allclose(draw.weights, (draw.probabilities.min() / draw.probabilities) ** beta, rtol=1e-12)
    assert any(np.ptp(draw.probabilities) > 0 for draw in draws)


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
