"""What TensorBoard shows, against the same numbers computed here from what each update saw."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.metrics import MetricBank
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.replay import AbsoluteReward
from freshper_lightning.trajectory import ClockReading
from tests.loop import Recorder, fit, policy, replay_data
from tests.replay.builders import make_trajectory

FRESH, REPLAY, ITERATIONS, MICRO = 2, 4, 3, 2
UPDATES = FRESH + REPLAY

PER_PHASE = ("loss", "ratio", "clip_share", "kl_behavior", "kl_reference", "entropy", "gradient_norm")
TAGS = {
    *(f"rollout/{name}" for name in ("return", "success", "length", "turns", "valid_actions", "environment_steps")),
    *(f"update/{phase}/{name}" for phase in ("fresh", "replay") for name in PER_PHASE),
    *(f"replay/{name}" for name in ("size", "bytes", "age_buffer", "age_drawn", "nonzero_advantages", "duplicates")),
    *(f"replay/{name}" for name in ("effective_draw", "share_of_training", "skipped", "beta")),
    *(f"time/{name}" for name in ("rollout", "sync", "update", "sample", "engine_tokens_per_second")),
    *(f"evaluation/{mode}/{name}" for mode in ("sampled", "greedy") for name in ("return", "success", "valid_actions")),
    *(f"ess_by_age/{level}/{bucket}" for level in ("token", "sequence") for bucket in ("0-1", "1-10", "10-30")),
    "evaluation/environment_steps",
    "update/learning_rate",
}
AT_START = ("rollout/", "time/rollout", "time/engine", "time/sync")
"""Written when an iteration begins; everything else when it ends."""


@dataclass
class Seen:
    recorder: Recorder
    scalars: dict
    folder: str
    data: object
    steps: int

    def updates(self, iteration, phase):
        """(batches, observations, gradient norm, draw) of each optimizer batch of an iteration."""
        first = iteration * UPDATES * MICRO
        for start in range(first, first + UPDATES * MICRO, MICRO):
            part, recorder = slice(start, start + MICRO), self.recorder
            if recorder.batches[start].phase == phase:
                last = start + MICRO - 1
                yield recorder.batches[part], recorder.observations[part], recorder.norms[last], recorder.draws[last]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, model_path):
    recorder, data = Recorder(), replay_data()
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.01))
    trainer = fit(
        tmp_path_factory.mktemp("logs"),
        module,
        data,
        iterations=ITERATIONS,
        extra=(recorder,),
        evaluation=EvaluationCallback(episodes=3, every_n_iterations=1, at_start=True),
        accumulate_grad_batches=MICRO,
    )
    return Seen(recorder, read_scalars(trainer.log_dir), trainer.log_dir, data, trainer.callbacks[0].environment_steps)


def test_everything_that_is_promised_is_written(seen):
    assert set(seen.scalars) >= TAGS


def test_the_x_axis_counts_applied_updates(seen):
    starts, ends = [0, UPDATES, 2 * UPDATES], [UPDATES, 2 * UPDATES, 3 * UPDATES]
    for tag in TAGS:
        steps = [step for step, _ in seen.scalars[tag]]
        if tag.startswith("evaluation/") or tag == "time/sync":
            assert steps == [0, *ends], tag
        elif tag.startswith(AT_START):
            assert steps == starts, tag
        else:
            assert set(steps) <= set(ends), tag
            assert steps == ends or tag.startswith("ess_by_age"), tag


def by_hand(seen, iteration, phase):
    tokens = {"ratio": [], "clipped": [], "kl_behavior": [], "kl_reference": [], "entropy": []}
    losses, norms = [], []
    for _, observations, norm, _ in seen.updates(iteration, phase):
        losses.append(sum(float(one.loss) for one in observations))
        norms.append(norm)
        for name, pieces in tokens.items():
            pieces += [one.token_metrics[name] for one in observations]
    means = {name: float(torch.cat(pieces).double().mean()) for name, pieces in tokens.items()}
    means["clip_share"] = means.pop("clipped")
    return means | {"loss": np.mean(losses), "gradient_norm": np.mean(norms)}


@pytest.mark.parametrize("phase", ["fresh", "replay"])
def test_update_metrics_are_means_over_the_updates_and_tokens_of_a_phase(seen, phase):
    for iteration in range(ITERATIONS):
        for name, value in by_hand(seen, iteration, phase).items():
            step, logged = seen.scalars[f"update/{phase}/{name}"][iteration]
            assert step == (iteration + 1) * UPDATES
            assert logged == pytest.approx(value, rel=1e-5, abs=1e-8), name


def test_effective_sizes_are_of_whole_trajectories_and_of_tokens(seen):
    for iteration in range(ITERATIONS):
        ratios = {"token": [], "sequence": []}
        for batches, observations, _, _ in seen.updates(iteration, "replay"):
            tokens, sequences = [], []
            for batch, one in zip(batches, observations, strict=True):
                log_ratio = one.token_metrics["log_ratio"].double()
                tokens.append(log_ratio.exp())
                sequences += [log_ratio[batch.segments == i].sum().exp() for i in range(len(batch.ids))]
            for level, weights in (("token", torch.cat(tokens)), ("sequence", torch.stack(sequences))):
                ratios[level].append(float(weights.sum() ** 2 / (weights**2).sum() / len(weights)))
        for level, values in ratios.items():
            assert seen.scalars[f"update/replay/ess_{level}"][iteration][1] == pytest.approx(np.mean(values), rel=1e-5)


def test_replay_metrics_describe_the_draws(seen):
    for iteration in range(ITERATIONS):
        draws = [(draw, batches) for batches, _, _, draw in seen.updates(iteration, "replay")]
        duplicates = [1 - len(set(draw.ids.tolist())) / len(draw.ids) for draw, _ in draws]
        nonzero = [
            float((batch.advantages[batch.segments == i].abs() > 0).any())
            for _, batches in draws
            for batch in batches
            for i in range(len(batch.ids))
        ]
        sizes = []
        for draw, _ in draws:
            weights = np.array([draw.weights[draw.ids == key].sum() for key in np.unique(draw.ids)])
            sizes.append(weights.sum() ** 2 / (weights**2).sum())
        expected = {
            "age_drawn": np.mean([draw.ages for draw, _ in draws]),
            "duplicates": np.mean(duplicates),
            "nonzero_advantages": np.mean(nonzero),
            "effective_draw": np.mean(sizes),
            "size": 8 * (iteration + 1),
            "share_of_training": REPLAY / UPDATES,
        }
        for name, value in expected.items():
            assert seen.scalars[f"replay/{name}"][iteration][1] == pytest.approx(value, rel=1e-5), name


def test_the_age_of_the_buffer_is_the_mean_over_its_entries(seen):
    for iteration in range(ITERATIONS):
        ages = [(iteration + 1 - entered) * UPDATES for entered in range(iteration + 1)]
        assert seen.scalars["replay/age_buffer"][iteration][1] == pytest.approx(np.mean(ages))
    assert seen.scalars["replay/bytes"][-1][1] == seen.data.buffer.nbytes


def test_environment_steps_are_the_turns_that_were_played(seen):
    turns = [item.num_turns for item in seen.data.buffer.get(seen.data.buffer.ids())]
    played = [sum(turns[: 8 * (iteration + 1)]) for iteration in range(ITERATIONS)]
    assert [value for _, value in seen.scalars["rollout/environment_steps"]] == played
    assert [value for _, value in seen.scalars["evaluation/environment_steps"]] == [0, *played]
    assert seen.steps == played[-1]


def test_rollout_metrics_are_means_over_the_episodes(seen):
    items = seen.data.buffer.get(seen.data.buffer.ids())
    for iteration in range(ITERATIONS):
        mine = items[8 * iteration : 8 * (iteration + 1)]
        turns = sum(item.num_turns for item in mine)
        expected = {
            "return": np.mean([item.episode_return for item in mine]),
            "success": np.mean([item.success for item in mine]),
            "length": np.mean([item.num_tokens for item in mine]),
            "turns": turns / 8,
            "valid_actions": 1 - sum(item.invalid_turns for item in mine) / turns,
        }
        for name, value in expected.items():
            assert seen.scalars[f"rollout/{name}"][iteration][1] == pytest.approx(value, rel=1e-6), name


def test_a_conversation_and_the_priorities_are_shown(seen):
    events = EventAccumulator(seen.folder, size_guidance={"tensors": 0, "histograms": 0}).Reload()
    texts = events.Tensors("rollout/conversation/text_summary")
    assert [event.step for event in texts] == [0, UPDATES, 2 * UPDATES]
    text = texts[0].tensor_proto.string_val[0].decode()
    assert "<|im_start|>user" in text
    assert "<|im_start|>assistant" in text
    histograms = events.Histograms("replay/log10_probability_over_uniform")
    assert [event.step for event in histograms] == [UPDATES, 2 * UPDATES, 3 * UPDATES]
    assert [event.histogram_value.num for event in histograms] == [8, 16, 24]


def test_an_algorithm_that_stores_no_advantages_is_logged_without_their_share():
    data = replay_data(priority=AbsoluteReward())
    data.bind(4, ClockReading)
    data.add_fresh([make_trajectory((1.0,), member=member) for member in range(4)])
    data.last_draw = data.buffer.sample(4, ClockReading(), 0.4)
    monitor = ReplayMonitor()
    monitor._count_draw(data, [])
    metrics = monitor.bank.flush()
    assert "replay/nonzero_advantages" not in metrics
    assert {"replay/age_drawn", "replay/duplicates", "replay/beta"} <= set(metrics)


def test_the_bank_weighs_values_and_leaves_out_what_nothing_counted_towards():
    bank = MetricBank()
    bank.update("a", torch.tensor([1.0, 3.0]))
    bank.update("a", 5.0, weight=2.0)
    bank.update("empty", 7.0, weight=0.0)
    assert bank.flush() == {"a": 3.5}
    assert bank.flush() == {}


def test_a_process_group_of_one_rank_needs_no_collective(monkeypatch):
    """On a GPU vLLM makes one that has none for what is in CPU memory."""
    monkeypatch.setattr(torchmetrics.Metric, "_sync_dist", lambda *_, **__: pytest.fail("a collective"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bank = MetricBank()
        bank.update("a", 2.0)
        assert bank.flush() == {"a": 2.0}
    finally:
        dist.destroy_process_group()


def test_the_state_of_the_bank_restores_every_bit():
    bank, other = MetricBank(), MetricBank()
    for value in (1 / 3, 2**-40, 0.1):
        bank.update("a", value)
    other.load_state_dict(bank.state_dict())
    for one in (bank, other):
        one.update("a", 1e-9)
    assert bank.flush() == other.flush()


def test_a_value_that_is_no_number_is_not_averaged_away():
    with pytest.raises(RuntimeError, match="nan"):
        MetricBank().update("a", float("nan"))
