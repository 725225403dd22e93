"""Logs as TensorBoard writes them, at times that the tests set."""

import time

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from freshper_lightning.compare.collect import training_seconds


def write(folder, suffix, events):
    """One file of (second, update, tag)."""
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for wall, update, tag in events:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=1.0)])
        writer.add_event(Event(wall_time=wall, step=update, summary=summary))
    writer.close()


def test_time_spent_on_evaluations_is_not_training(tmp_path):
    events = [(100, 0, "rollout/return"), (110, 2, "update/fresh/loss"), (150, 2, "evaluation/sampled/return")]
    write(tmp_path, ".one", [*events, (150, 2, "evaluation/greedy/return"), (155, 2, "rollout/return"), (163, 4, "x")])
    assert training_seconds(tmp_path) == {0: 0, 2: 15, 4: 23}


def test_an_attempt_goes_on_with_the_time_of_the_checkpoint_that_it_resumed_from(tmp_path):
    """Killed at update 5 after a checkpoint at 4: what came after the checkpoint is done again, and counted once."""
    write(
        tmp_path, ".first", [(100, 0, "rollout/return"), (120, 4, "update/fresh/loss"), (190, 5, "update/fresh/loss")]
    )
    time.sleep(0.01)
    write(tmp_path, ".second", [(9000, 4, "rollout/return"), (9007, 5, "update/fresh/loss"), (9010, 8, "x")])
    assert training_seconds(tmp_path) == {0: 0, 4: 20, 5: 27, 8: 30}


def test_the_loop_that_lightning_logs_beside_the_scalars_counts_as_nothing(tmp_path):
    write(tmp_path, ".one", [(50, 7, "epoch"), (100, 0, "rollout/return"), (120, 4, "update/fresh/loss")])
    assert training_seconds(tmp_path) == {0: 0, 4: pytest.approx(20)}
