import re

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.tensorboard.writer import SummaryWriter

from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.progress import LoopProgress
from freshper_lightning.callbacks.report import Report, _evaluation, read_scalars
from tests.loop import fit, policy, replay_data

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def reported(tmp_path_factory, model_path):
    """What a run with a report printed, and its trainer."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        run = fit(
            folder,
            policy(model_path),
            replay_data(),
            extra=(Report(),),
            evaluation=EvaluationCallback(episodes=8, every_n_iterations=1),
            checkpoint=ModelCheckpoint(save_last="link", save_on_train_epoch_end=True),
        )
    return "\n".join(lines), run


def row(text, name):
    (found,) = re.findall(rf"^{re.escape(name)} {{2,}}(.*)$", text, re.MULTILINE)
    return found


def test_the_table_shows_success_before_and_after(reported):
    text, run = reported
    evaluation = callback_of(run, EvaluationCallback)
    for mode in ("sampled", "greedy"):
        before, after = (m[f"evaluation/{mode}/success"] for m in (evaluation.first, evaluation.latest))
        said = row(text, f"success, {mode}")
        assert f"{100 * before:.1f} %" in said.split("before")[0]
        assert f"{100 * after:.1f} %" in said.split("before")[1]
        assert "8 held-out episodes" in said


def test_a_mode_that_the_run_before_did_not_play_is_shown_as_far_as_it_is_known(reported):
    _, run = reported
    evaluation = callback_of(run, EvaluationCallback)
    first = {name: value for name, value in evaluation.first.items() if "greedy" in name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "first", first)
        names = dict(_evaluation(run))
    assert "before" not in names["success, sampled"]
    assert "before" in names["success, greedy"]


def test_the_table_shows_steps_share_of_replay_and_effective_sizes(reported):
    text, run = reported
    assert row(text, "optimizer steps") == "12"
    assert row(text, "environment steps") == str(run.callbacks[0].environment_steps)
    assert row(text, "replayed data").startswith("66.7 %")
    scalars = read_scalars(run.log_dir)
    for level in ("token", "sequence"):
        assert row(text, f"ESS / n, {level}").startswith(f"{scalars[f'update/replay/ess_{level}'][-1][1]:.3f}")


def test_the_table_says_where_things_lie_and_they_do(reported):
    text, run = reported
    assert row(text, "logs") == f"tensorboard --logdir {run.log_dir}"
    with open(row(text, "learning curve"), "rb") as picture:
        assert picture.read(8) == PNG
    with open(row(text, "checkpoint"), "rb") as checkpoint:
        assert checkpoint.read(2) == b"PK"


def test_a_line_of_progress_stands_for_so_many_iterations(tmp_path, model_path, capsys):
    fit(tmp_path, policy(model_path), replay_data(), iterations=5, progress=LoopProgress(line_every=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.split()[1] for line in lines] == ["2/5", "4/5", "5/5"]
    assert "return" in lines[0]


@pytest.mark.parametrize("names", ["12", "21"], ids=["in order", "in the wrong order"])
def test_of_a_step_that_was_written_twice_the_newer_value_counts_whatever_the_files_are_called(tmp_path, names):
    for name, value in zip(names, (1.0, 2.0), strict=True):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalar("a", value, 5)
            writer.add_scalar("a", value + 10, int(value))
        (file,) = (tmp_path / name).iterdir()
        file.rename(tmp_path / f"events.out.tfevents.{name}")
    assert read_scalars(tmp_path) == {"a": [(1, 11.0), (2, 12.0), (5, 2.0)]}
