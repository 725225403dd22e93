"""Logs as TensorBoard writes them, at times that the tests set."""

import time

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from freshper_lightning.callbacks.evaluation import ITERATION, STEPS
from freshper_lightning.compare.collect import evaluations, training_seconds


def write(folder, suffix, events):
    """One file of (second, update, tag), and a value where it matters."""
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for wall, update, tag, *value in events:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value[0] if value else 1.0)])
        writer.add_event(Event(wall_time=wall, step=update, summary=summary))
    writer.close()


def test_neither_evaluations_nor_the_next_rollout_are_time_up_to_an_update(tmp_path):
    """Rollout 10 s, updates 5, evaluations 30, rollout 20, updates 3."""
    first = [(100, 0, "time/sync"), (110, 0, "time/rollout"), (115, 2, "update/fresh/loss"), (115, 2, "time/update")]
    then = [(145, 2, "evaluation/sampled/return"), (145, 2, "evaluation/greedy/return")]
    write(tmp_path, ".one", [*first, *then, (145, 2, "time/sync"), (165, 2, "time/rollout"), (168, 4, "update/x")])
    assert training_seconds(tmp_path) == {0: 0, 2: 15, 4: 38}


@pytest.mark.parametrize("evaluations", [[], [(1045, 2, "evaluation/sampled/return")]])
def test_a_rollout_that_a_kill_undid_counts_once(tmp_path, evaluations):
    """Rollout 10 s, update 5, perhaps an evaluation, rollout 20, update 5; killed behind the second rollout."""
    start = [(1000, 0, "time/sync"), (1010, 0, "rollout/return"), (1015, 2, "update/x"), *evaluations]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    later = start[-1][0]
    write(
        whole, ".one", [*start, (later, 2, "time/sync"), (later + 20, 2, "rollout/return"), (later + 25, 4, "update/x")]
    )
    write(killed, ".one", [*start, (later, 2, "time/sync"), (later + 20, 2, "rollout/return")])
    time.sleep(0.01)
    write(killed, ".two", [(9000, 2, "time/sync"), (9020, 2, "rollout/return"), (9025, 4, "update/x")])
    assert training_seconds(whole) == training_seconds(killed) == {0: 0, 2: 15, 4: 40}


def test_an_attempt_goes_on_with_the_time_of_the_checkpoint_that_it_resumed_from(tmp_path):
    """Killed at update 5 after a checkpoint at 4: what came after the checkpoint is done again, and counted once."""
    write(
        tmp_path, ".first", [(100, 0, "rollout/return"), (120, 4, "update/fresh/loss"), (190, 5, "update/fresh/loss")]
    )
    time.sleep(0.01)
    write(tmp_path, ".second", [(9000, 4, "time/sync"), (9007, 5, "update/fresh/loss"), (9010, 8, "update/x")])
    assert training_seconds(tmp_path) == {0: 0, 4: 20, 5: 27, 8: 30}


def evaluation(wall, update, iteration, score):
    """As it is logged: the iteration last, and times a moment apart."""
    named = {"evaluation/sampled/return": score, STEPS: 100.0 * iteration, ITERATION: float(iteration)}
    return [(wall + index / 1000, update, tag, value) for index, (tag, value) in enumerate(named.items())]


def test_two_evaluations_without_an_update_between_them_are_two(tmp_path):
    """As where a policy gives up and a filter of groups leaves nothing to train on."""
    write(tmp_path, ".one", [*evaluation(100, 8, 1, 0.5), *evaluation(150, 8, 2, 0.25), (151, 8, "update/x")])
    found = evaluations(tmp_path)
    assert found[1] == (8, {"evaluation/sampled/return": 0.5, STEPS: 100.0, ITERATION: 1.0})
    assert found[2] == (8, {"evaluation/sampled/return": 0.25, STEPS: 200.0, ITERATION: 2.0})


def test_of_an_evaluation_that_was_repeated_the_newer_one_counts_and_one_that_was_cut_off_does_not(tmp_path):
    whole, repeated = evaluation(100, 8, 1, 0.5), evaluation(9000, 8, 1, 0.75)
    write(tmp_path, ".one", [*whole, *evaluation(200, 16, 2, 0.125)[:1]])
    time.sleep(0.01)
    write(tmp_path, ".two", repeated)
    assert evaluations(tmp_path) == {1: (8, {"evaluation/sampled/return": 0.75, STEPS: 100.0, ITERATION: 1.0})}


def test_the_loop_that_lightning_logs_beside_the_scalars_counts_as_nothing(tmp_path):
    write(tmp_path, ".one", [(50, 7, "epoch"), (100, 0, "rollout/return"), (120, 4, "update/fresh/loss")])
    assert training_seconds(tmp_path) == {0: 0, 4: pytest.approx(20)}
