"""Logs as TensorBoard writes them, at times that the tests set."""

import time

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from freshper_lightning.compare.collect import training_seconds


def write(folder, suffix, events):
    """One file of (second, update, tag) or (second, update, tag, value)."""
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for wall, update, tag, *value in events:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value[0] if value else 1.0)])
        writer.add_event(Event(wall_time=wall, step=update, summary=summary))
    writer.close()


def test_time_spent_on_evaluations_is_not_training(tmp_path):
    events = [(100, 0, "rollout/return"), (110, 2, "update/fresh/loss"), (150, 2, "evaluation/sampled/return")]
    write(tmp_path, ".one", [*events, (150, 2, "evaluation/greedy/return"), (155, 2, "rollout/return"), (163, 4, "x")])
    assert training_seconds(tmp_path) == {0: 0, 2: 10, 4: 23}


def test_the_first_rollout_counts_and_one_that_a_kill_undid_does_not_count_twice(tmp_path):
    """Whole: rollout 10, update 5, evaluation 30, rollout 20, update 5. Killed after the second rollout: the same."""
    start = [(1000, 0, "time/rollout", 10.0), (1005, 2, "x"), (1035, 2, "evaluation/sampled/return")]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write(whole, ".one", [*start, (1055, 2, "time/rollout", 20.0), (1060, 4, "x")])
    write(killed, ".one", [*start, (1055, 2, "time/rollout", 20.0)])
    time.sleep(0.01)
    write(killed, ".two", [(9020, 2, "time/rollout", 20.0), (9025, 4, "x")])
    assert training_seconds(whole) == training_seconds(killed) == {0: 10, 2: 15, 4: 40}


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
