"""A run that is killed and resumed ends as one that was not: same logs, weights, optimizer and buffer, bit by bit."""

import json
import signal

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.checkpoint import LAST, side_files
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.net import PolicyNet
from tests.command import in_another_process, in_this_process
from tests.loop import Recorder, fit, policy, replay_data

SAVE_AT_END = "--trainer.callbacks+=tests.command.SaveAtEnd"

WHEN = {
    "at the border, by iterations": ("--checkpoint.every_n_epochs=1", 1, 6),
    "at the border, by updates": ("--checkpoint.every_n_train_steps=6", 2, 12),
    "in the middle, in fresh data": ("--checkpoint.every_n_train_steps=7", 1, 7),
    "in the middle, in replay": ("--checkpoint.every_n_train_steps=4", 2, 8),
}
"""Trigger, checkpoint after which the process is killed, and updates then; an iteration has 6, of which 2 are fresh."""

DECOUPLED = "--model.algorithm=DecoupledGRPO"


def killing(after, within=False):
    plugin = {"class_path": "tests.command.KillingCheckpointIO", "init_args": {"after": after, "within": within}}
    return f"--trainer.plugins={json.dumps(plugin)}"


def scalars(folder):
    return {tag: points for tag, points in read_scalars(folder / "run").items() if not tag.startswith("time/")}


def final(folder):
    """Everything that the last checkpoint of a finished run holds and a user could miss, without names of files."""
    last = torch.load(folder / "run" / "last_of_all.ckpt", weights_only=True)
    (side,) = side_files(folder / "run" / "last_of_all.ckpt")
    buffer = torch.load(side, weights_only=True)
    callbacks = {name: state for name, state in last["callbacks"].items() if not name.startswith("ModelCheckpoint")}
    return last["state_dict"], last["optimizer_states"], buffer, callbacks


def assert_same(one, other, where=""):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{where}/{index}")
    else:
        assert one == other or (one != one and other != other), where


def assert_ended_alike(folder, other):
    seen, expected = scalars(folder), scalars(other)
    assert seen.keys() == expected.keys()
    for tag, points in expected.items():
        assert seen[tag] == points, tag
    for mine, theirs in zip(final(folder), final(other), strict=True):
        assert_same(mine, theirs)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, model_path):
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, model_path, folder, SAVE_AT_END)
    return folder


@pytest.mark.parametrize("when", WHEN)
def test_a_run_that_is_killed_and_resumed_ends_as_the_uninterrupted_one(
    tmp_path, monkeypatch, model_path, uninterrupted, when
):
    trigger, after, step = WHEN[when]
    killed = in_another_process(model_path, tmp_path, trigger, killing(after))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob(f"*step={step}.ckpt")
    in_this_process(monkeypatch, model_path, tmp_path, SAVE_AT_END, trigger, f"--ckpt_path={checkpoint}")
    assert_ended_alike(tmp_path, uninterrupted)


def test_a_run_that_is_killed_inside_epochs_goes_on_with_their_draws_and_their_proximal_policies(
    tmp_path, monkeypatch, model_path
):
    """After one of the two updates of an epoch of replay, then of one of fresh data."""
    once, twice, short = tmp_path / "once", tmp_path / "twice", "--trainer.max_epochs=2"
    in_this_process(monkeypatch, model_path, once, SAVE_AT_END, DECOUPLED, short)
    settings = ("--checkpoint.every_n_train_steps=1", DECOUPLED, short)
    resume = ()
    for after, name in ((3, "epoch=0-step=3.ckpt"), (4, "epoch=1-step=7.ckpt")):
        killed = in_another_process(model_path, twice, *settings, killing(after), *resume)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        path = twice / "run" / "checkpoints" / name
        assert list(torch.load(path, weights_only=True)["ReplayDataModule"]["epoch"]["batches"]) == [0, 1]
        resume = (f"--ckpt_path={path}",)
    in_this_process(monkeypatch, model_path, twice, SAVE_AT_END, *settings, *resume)
    assert_ended_alike(twice, once)


def test_a_run_may_be_killed_more_than_once(tmp_path, monkeypatch, model_path, uninterrupted):
    """First at the last update of an iteration, then in the middle of another."""
    trigger, folder = "--checkpoint.every_n_train_steps=2", tmp_path / "run" / "checkpoints"
    for after, resume in ((3, ()), (5, ("--ckpt_path", str(folder / "epoch=0-step=6.ckpt")))):
        killed = in_another_process(model_path, tmp_path, trigger, killing(after), *resume)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    in_this_process(
        monkeypatch, model_path, tmp_path, SAVE_AT_END, trigger, f"--ckpt_path={folder / 'epoch=2-step=16.ckpt'}"
    )
    assert_ended_alike(tmp_path, uninterrupted)


def test_a_run_of_several_micro_batches_saves_between_optimizer_batches_only_and_goes_on_again(
    tmp_path, monkeypatch, model_path
):
    """The step of the checkpoint that it resumes from is due again, until the first update is over."""
    whole, twice, halves = tmp_path / "whole", tmp_path / "twice", "--trainer.accumulate_grad_batches=2"
    in_this_process(monkeypatch, model_path, whole, SAVE_AT_END, halves)
    trigger, folder, resume = "--checkpoint.every_n_train_steps=4", twice / "run" / "checkpoints", ()
    for _ in range(2):
        killed = in_another_process(model_path, twice, trigger, halves, killing(after=1), *resume)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        resume = (f"--ckpt_path={folder / LAST}",)
    assert (folder / LAST).resolve().name == "epoch=1-step=8.ckpt"
    in_this_process(monkeypatch, model_path, twice, SAVE_AT_END, trigger, halves, *resume)
    assert_ended_alike(twice, whole)


def test_a_run_that_is_told_to_end_does_not_pass_for_a_finished_one(tmp_path, model_path):
    told = in_another_process(model_path, tmp_path, "--trainer.callbacks+=tests.command.TermsItself")
    assert told.returncode == 128 + signal.SIGTERM, told.stderr


REFUSED = {
    "a length in steps": ({"max_steps": 9}, r"trainer\.max_steps=9 must be -1 where a run is resumed.*max_epochs"),
    "two ranks": ({"devices": 2, "strategy": "ddp"}, r"ckpt_path=.* must be loaded on one rank, not on .* = 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_resume_as_something_else_is_refused(tmp_path, monkeypatch, model_path, what):
    fields, message = REFUSED[what]
    in_this_process(monkeypatch, model_path, tmp_path, "--trainer.max_epochs=1")
    last = tmp_path / "run" / "checkpoints" / LAST
    options = [f"--trainer.{key}={value}" for key, value in fields.items()]
    monkeypatch.setattr(PolicyNet, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    for command in ("fit",) if "max_steps" in fields else ("fit", "validate", "test"):
        with pytest.raises(SystemExit, match=message):
            in_this_process(monkeypatch, model_path, tmp_path, *options, f"--ckpt_path={last}", command=command)


def test_a_trainer_of_several_steps_is_refused_without_the_command_line_as_well(tmp_path, model_path):
    fit(tmp_path, policy(model_path), replay_data(), iterations=1)
    last = tmp_path / "run" / "checkpoints" / LAST
    with pytest.raises(ConfigurationError, match=r"trainer\.max_steps=9 must be -1"):
        fit(tmp_path, policy(model_path), replay_data(), ckpt_path=last, max_steps=9)


def test_a_run_killed_while_it_writes_resumes_from_the_checkpoint_before(
    tmp_path, monkeypatch, model_path, uninterrupted
):
    """A torn temporary file and a newer side file that no checkpoint names are in the way, and do not matter."""
    trigger = "--checkpoint.every_n_train_steps=4"
    killed = in_another_process(model_path, tmp_path, trigger, killing(after=1, within=True))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "run" / "checkpoints"
    names = {path.name for path in folder.iterdir()}
    (whole,) = {name for name in names if name.endswith("step=4.ckpt")}
    assert {name for name in names if "step=8" in name} == {"epoch=1-step=8.ckpt.tmp", "epoch=1-step=8.ckpt.0.buffer"}
    assert (folder / LAST).resolve().name == whole
    in_this_process(monkeypatch, model_path, tmp_path, SAVE_AT_END, trigger, f"--ckpt_path={folder / LAST}")
    assert_ended_alike(tmp_path, uninterrupted)


def test_a_longer_iteration_is_whole_where_a_run_goes_on_from_the_last_update_of_a_shorter_one(tmp_path, model_path):
    """Lightning would take the batches of the shorter one for done."""
    last = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, policy(model_path), replay_data(replay_updates=0), iterations=1, checkpoint=last)
    recorder, path = Recorder(), str(tmp_path / "step=2.ckpt")
    fit(tmp_path, policy(model_path), replay_data(replay_updates=2), path, iterations=2, extra=(recorder,))
    assert [batch.phase for batch in recorder.batches] == ["fresh"] * 2 + ["replay"] * 4
    assert recorder.batches[-1].ends_iteration
