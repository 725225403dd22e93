"""Compiled decoder layers."""

import os
import shutil

import pytest
import torch
from lightning import Callback

from tests.loop import Recorder, fit, policy, replay_data

COMPILER = os.environ.get("CXX", "g++")


class CountGraphs(Callback):
    def __init__(self):
        self.after = []

    def on_train_batch_end(self, *_):
        self.after.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"torch.compile needs a C++ compiler, {COMPILER} is none")
def test_a_compiled_policy_trains_as_one_that_is_not(tmp_path, model_path):
    """A row alone, several rows and shared openings may each have a graph of their own, but not every length."""
    runs, graphs = [], CountGraphs()
    for compiled in (False, True):
        recorder = Recorder()
        extra = (recorder, graphs) if compiled else (recorder,)
        fit(tmp_path / str(compiled), policy(model_path, compile=compiled), replay_data(), extra=extra)
        runs.append(recorder)
    shapes = {batch.input_ids.shape for batch in runs[1].batches}
    assert 1 <= graphs.after[-1] < len(shapes), graphs.after
    assert {batch.spans is None for batch in runs[1].batches} == {True, False}, "some share openings and some do not"
    for mine, other in zip(runs[0].observations, runs[1].observations, strict=True):
        torch.testing.assert_close(other.loss, mine.loss, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(torch.tensor(runs[1].norms), torch.tensor(runs[0].norms), rtol=1e-3, atol=1e-6)
