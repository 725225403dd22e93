"""Groups of equal outcomes, left out of everything; the number of optimizer batches stays."""

import torch

from freshper_lightning.algorithms import GRPO
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.rollout.collector import EnvironmentConfig
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback


def test_groups_without_signal_reach_neither_batches_nor_counts_nor_buffer(tmp_path, model_path):
    recorder, data = Recorder(), replay_data()
    # A threshold between the deviations of this seed's groups, so that some stay.
    rollout = rollout_callback(
        environment=EnvironmentConfig("tests/HashScore-v0", {"levels": 2}), groups=4, group_size=2
    )
    module = policy(model_path, algorithm=GRPO(group_filter=0.2))
    trainer = fit(tmp_path, module, data, rollout=rollout, iterations=3, extra=(recorder,))
    assert len(recorder.batches) == 3 * (1 + 2) * 2
    stored = data.buffer.get(data.buffer.ids())
    assert 0 < len(stored) < 3 * 8
    assert len(stored) % 2 == 0, "groups are left out as a whole"
    assert min(item.group_std for item in stored) > 0.2
    filtered = [value for _, value in read_scalars(trainer.log_dir)["rollout/filtered"]]
    assert sum(filtered) == 3 * 8 - len(stored)
    fresh = [batch for batch in recorder.batches if batch.phase == "fresh"]
    for iteration, dropped in enumerate(filtered):
        pair = fresh[2 * iteration : 2 * iteration + 2]
        assert sum(batch.total_sequences for batch in pair) == 8 - dropped
        assert all(batch.total_tokens == float(batch.lengths.sum()) * (not batch.skip) for batch in pair)


def test_an_iteration_without_any_signal_skips_its_updates(tmp_path, model_path):
    recorder, data = Recorder(), replay_data(replay_updates=1)
    rollout = rollout_callback(environment=EnvironmentConfig("tests/HashScore-v0", {"levels": 1}), format_penalty=0.0)
    module = policy(model_path, algorithm=GRPO(group_filter=1e-6))
    trainer = fit(tmp_path, module, data, rollout=rollout, extra=(recorder,), enable_checkpointing=False)
    assert [batch.skip for batch in recorder.batches] == [True] * 8
    assert (len(data.buffer), trainer.callbacks[0].clock.updates) == (0, 0)
    # Both iterations are written at the clock 0, which has not moved, and the later one is kept.
    scalars = read_scalars(trainer.log_dir)
    assert scalars["replay/skipped"] == [(0, 8.0)]
    assert scalars["rollout/filtered"] == [(0, 8.0)]
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
