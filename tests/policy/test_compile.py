"""Compiled decoder layers."""

import os
import shutil

import pytest
import torch

from tests.loop import Recorder, fit, policy, replay_data

COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"torch.compile needs a C++ compiler, {COMPILER} is none")
def test_a_compiled_policy_trains_as_one_that_is_not(tmp_path, model_path):
    """Lengths differ from batch to batch, and are compiled for once."""
    runs = []
    for compiled in (False, True):
        recorder = Recorder()
        fit(tmp_path / str(compiled), policy(model_path, compile=compiled), replay_data(), extra=(recorder,))
        runs.append(recorder)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    widths = {batch.input_ids.shape for batch in runs[1].batches}
    assert len(widths) > 1
    assert {batch.spans is None for batch in runs[1].batches} == {True, False}, "some share openings and some do not"
    for mine, other in zip(runs[0].observations, runs[1].observations, strict=True):
        torch.testing.assert_close(other.loss, mine.loss, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(torch.tensor(runs[1].norms), torch.tensor(runs[0].norms), rtol=1e-3, atol=1e-6)
