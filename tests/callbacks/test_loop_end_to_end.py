"""One trajectory from the engine to its last replay, against formulas that are written out here."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning import Callback

from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.replay import AbsoluteAdvantage, ExponentialDecay
from freshper_lightning.rollout.sampling import SamplingConfig
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback
from tests.policy.transcripts import context

GROUPS, SIZE, BATCH, ITERATIONS = 2, 4, 4, 3
TAU, ALPHA, EPS = 5.0, 0.6, 1e-6
BETA, BETA_END, BETA_UPDATES = 0.4, 1.0, 15
PENALTY = -0.25
TEMPERATURE = 0.8


class Wiretap(Callback):
    """Every completion that the engine gives, by prompt and reply."""

    def __init__(self):
        self.spoken = {}

    def on_train_start(self, trainer, pl_module):
        rollout = next(c for c in trainer.callbacks if isinstance(c, RolloutCallback))
        engine = rollout.collector(trainer, pl_module).engine
        generate = engine.generate

        def listen(requests):
            requests = list(requests)
            completions = generate(requests)
            for request, completion in zip(requests, completions, strict=True):
                self.spoken[tuple(request.prompt_token_ids), completion.token_ids] = completion
            return completions

        engine.generate = listen


class Look(Recorder):
    """Also keeps, for each replay batch, what the buffer says at that moment."""

    def __init__(self):
        super().__init__()
        self.content = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        buffer, now = trainer.datamodule.buffer, self.clocks[-1]
        self.content.append((buffer.ids(), buffer.probabilities(now)))


@dataclass
class Run:
    look: Look
    spoken: dict
    data: object


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_path):
    look, tap = Look(), Wiretap()
    data = replay_data(
        batch_size=BATCH,
        replay_updates=2,
        priority=AbsoluteAdvantage(eps=EPS),
        decay=ExponentialDecay(TAU),
        alpha=ALPHA,
        beta=BETA,
        beta_end=BETA_END,
        beta_updates=BETA_UPDATES,
    )
    rollout = rollout_callback(
        groups=GROUPS,
        group_size=SIZE,
        format_penalty=PENALTY,
        sampling=SamplingConfig(temperature=TEMPERATURE, max_tokens=6),
    )
    module = policy(model_path, lr=3e-3, algorithm=GRPO(), temperature=TEMPERATURE)
    fit(tmp_path_factory.mktemp("run"), module, data, rollout=rollout, iterations=ITERATIONS, extra=(look, tap))
    return Run(look, tap.spoken, data)


def trajectories_of(run):
    """Every trajectory that was ever collected, by id; nothing has been evicted."""
    ids = run.data.buffer.ids()
    assert len(ids) == GROUPS * SIZE * ITERATIONS
    return dict(zip(ids.tolist(), run.data.buffer.get(ids), strict=True))


def born_at(run):
    """The clock in updates at which each trajectory entered, from the number of updates per iteration alone."""
    per_iteration = 3 * GROUPS * SIZE // BATCH
    return {key: key // (GROUPS * SIZE) * per_iteration for key in trajectories_of(run)}


def expected_advantages(run):
    """GRPO by hand: return with penalty, minus the group's mean, over its biased deviation plus 1e-6."""
    result, items = {}, trajectories_of(run)
    for first in range(0, len(items), SIZE):
        members = range(first, first + SIZE)
        returns = np.array([sum(items[m].rewards.tolist()) + PENALTY * items[m].invalid_turns for m in members])
        spread = math.sqrt(((returns - returns.mean()) ** 2).mean())
        for member, value in zip(members, returns, strict=True):
            result[member] = (value - returns.mean()) / (spread + 1e-6)
    return result


def expected_probabilities(run, updates):
    """FreshPER by hand, in float64: ((|A| + eps) exp(-age / tau)) ** alpha, normalised."""
    born, items = born_at(run), trajectories_of(run)
    present = [key for key in items if born[key] <= updates]
    masses = []
    for key in present:
        base = abs(float(items[key].advantages[0])) + EPS
        masses.append((base * math.exp(-(updates - born[key]) / TAU)) ** ALPHA)
    return present, np.array(masses) / sum(masses)


def as_spoken(run, item):
    """Tokens, log-probs and weight versions of the item's replies, as they left the engine."""
    tokens, log_probs, versions = [], [], []
    for start, end in item.turns.tolist():
        completion = run.spoken[tuple(item.token_ids[:start].tolist()), tuple(item.token_ids[start:end].tolist())]
        tokens += completion.token_ids
        log_probs += completion.log_probs
        versions.append(completion.weight_version)
    return tokens, torch.tensor(log_probs, dtype=torch.float32), versions


def test_tokens_as_sampled_are_tokens_as_trained(run):
    items, trained = trajectories_of(run), set()
    for batch in run.look.batches:
        for place, key in enumerate(batch.ids.tolist()):
            mine = batch.segments == place
            tokens, log_probs, versions = as_spoken(run, items[key])
            assert batch.targets[mine].tolist() == tokens
            end = int(items[key].turns[-1, 1])
            assert [*context(batch, place).tolist(), tokens[-1]] == items[key].token_ids[:end].tolist()
            assert torch.equal(batch.behavior_log_probs[mine], log_probs)
            assert versions == [born_at(run)[key]] * items[key].num_turns
            trained.add(key)
    assert trained == set(items)
    assert any(batch.spans is not None for batch in run.look.batches), "members of a group share their prompt"


def test_at_age_zero_the_trainer_agrees_with_the_engine(run):
    firsts = [
        seen.token_metrics
        for batch, seen in zip(run.look.batches, run.look.observations, strict=True)
        if batch.phase == "fresh" and batch.ages.max() == 0
    ]
    assert len(firsts) == ITERATIONS
    for metrics in firsts:
        assert (metrics["ratio"] - 1).abs().max() < 1e-5
        assert metrics["clipped"].sum() == 0
        assert metrics["kl_behavior"].max() < 1e-9
    later = torch.cat(run.look.metric("ratio")[-4:])
    assert (later - 1).abs().max() > 1e-2, "the policy has not moved, so that nothing was shown"


def test_advantages_are_those_of_the_group_and_never_change(run):
    expected = expected_advantages(run)
    assert max(map(abs, expected.values())) > 1
    for key, item in trajectories_of(run).items():
        for advantage in item.advantages.tolist():
            assert advantage == pytest.approx(expected[key], rel=1e-6, abs=1e-6)
    for batch in run.look.batches:
        for place, key in enumerate(batch.ids.tolist()):
            seen = batch.advantages[batch.segments == place]
            assert set(seen.tolist()) == set(trajectories_of(run)[key].advantages.tolist())


def test_every_draw_has_the_probabilities_ages_and_weights_of_the_formulas(run):
    replayed, born = [], born_at(run)
    for index, draw in enumerate(run.look.draws):
        if draw is None:
            continue
        updates = run.look.clocks[index].updates
        assert updates == index, "one micro-batch is one update here, and none is skipped"
        present, expected = expected_probabilities(run, updates)
        ids, probabilities = run.look.content[index]
        assert ids.tolist() == present
        np.testing.assert_allclose(probabilities, expected, rtol=1e-12)
        of_draw = dict(zip(present, expected, strict=True))
        drawn = np.array([of_draw[key] for key in draw.ids.tolist()])
        np.testing.assert_allclose(draw.probabilities, drawn, rtol=1e-12)
        assert draw.ages.tolist() == [updates - born[key] for key in draw.ids.tolist()]
        beta = BETA + (BETA_END - BETA) * min(1.0, updates / BETA_UPDATES)
        raw = (len(present) * drawn) ** -beta
        np.testing.assert_allclose(draw.weights, raw / raw.max(), rtol=1e-12)
        batch = run.look.batches[index]
        assert batch.ids.tolist() == draw.ids.tolist()
        assert batch.ages.tolist() == draw.ages.tolist()
        assert torch.equal(batch.importance_weights, torch.from_numpy(draw.weights).float())
        replayed += draw.ids.tolist()
    assert len(replayed) == ITERATIONS * 2 * GROUPS * SIZE


def appearances(run, key):
    """(update, place in the batch) of each micro-batch that holds the trajectory."""
    for index, batch in enumerate(run.look.batches):
        for place in np.flatnonzero(batch.ids.numpy() == key).tolist():
            yield index, place


def test_one_trajectory_is_followed_from_the_engine_to_its_last_replay(run):
    """Of those that are trained on at age 0, the one that is replayed most."""
    young = {key for batch in run.look.batches if batch.ages.max() == 0 for key in batch.ids.tolist()}
    key = max(young, key=lambda candidate: len(list(appearances(run, candidate))))
    item, born = trajectories_of(run)[key], born_at(run)[key]
    tokens, log_probs, _ = as_spoken(run, item)
    magnitude = abs(float(item.advantages[0]))
    assert magnitude == pytest.approx(abs(expected_advantages(run)[key]), abs=1e-6)
    ages = []
    for index, place in appearances(run, key):
        batch, seen = run.look.batches[index], run.look.observations[index]
        mine, age = batch.segments == place, index - born
        ages.append(age)
        assert batch.targets[mine].tolist() == tokens
        assert torch.equal(batch.behavior_log_probs[mine], log_probs)
        assert batch.ages[place] == age
        ratio = seen.token_metrics["ratio"][mine]
        assert bool(((ratio - 1).abs() < 1e-5).all()) == (age == 0)
        if batch.phase == "fresh":
            assert batch.importance_weights[place] == 1
            continue
        draw = run.look.draws[index]
        present, probabilities = expected_probabilities(run, index)
        total = sum(
            (abs(float(trajectories_of(run)[k].advantages[0])) + EPS) ** ALPHA
            * math.exp(-ALPHA * (index - born_at(run)[k]) / TAU)
            for k in present
        )
        priority = (magnitude + EPS) * math.exp(-age / TAU)
        assert draw.probabilities[place] == pytest.approx(priority**ALPHA / total, rel=1e-12)
        rarest = min(probabilities[present.index(other)] for other in draw.ids.tolist())
        beta = BETA + (BETA_END - BETA) * min(1.0, index / BETA_UPDATES)
        assert draw.weights[place] == pytest.approx((rarest / draw.probabilities[place]) ** beta, rel=1e-12)
    assert ages[0] == 0
    assert len(ages) >= 4
