"""The command in miniature: training with snapshots, measuring, stopping and going on."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from freshper_lightning.checkpoint import LAST
from freshper_lightning.cli import main
from freshper_lightning.commands import export
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.study import report, table
from freshper_lightning.study.bootstrap import Estimate
from freshper_lightning.study.menu import MENU
from freshper_lightning.study.snapshots import snapshot
from freshper_lightning.study.staleness import _updates_of, staleness
from tests.command import TINY, environment


@pytest.fixture
def commands():
    """What was trained, command by command."""
    return []


@pytest.fixture
def study(model_path, tmp_path, monkeypatch, commands):
    for name, value in environment(model_path, tmp_path).items():
        monkeypatch.setenv(name, value)

    def train(arguments):
        commands.append(arguments)
        main(arguments)

    def run(ages, folder="run"):
        results = tmp_path / f"{folder}.csv"
        staleness(
            policy=str(model_path),
            run=tmp_path / folder,
            seed=3,
            options=["-c", str(TINY)],
            ages=ages,
            groups=2,
            results=results,
            picture=results.with_suffix(".png"),
            train=train,
            code="abc",
            draws=10,
        )
        return table.read(results)

    return run


def at(rows, age):
    """As text, since a quantity that noise hides is NaN, which equals nothing."""
    return [repr(row) for row in rows if row.age == age]


def test_what_is_measured_is_kept_and_a_stopped_study_goes_on_as_one_that_was_not(study, tmp_path):
    whole = study([0, 3, 6], "whole")
    first = study([0, 3])
    path = tmp_path / "run.csv"
    marked = [replace(row, value=-5.0) if row.age == 3 else row for row in first]
    table.write(path, marked)
    shutil.rmtree(snapshot(tmp_path / "run" / "snapshots", 0))
    extended = study([0, 3, 6])
    assert at(extended, 3) == at(marked, 3)
    for age in (0, 6):
        assert at(extended, age) == at(whole, age)
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_a_snapshot_is_the_policy_after_that_many_updates(study, model_path, tmp_path):
    def weights(updates):
        return load_file(snapshot(tmp_path / "run" / "snapshots", updates) / "model.safetensors")

    study([0, 2, 3])
    last = tmp_path / "run" / "train" / "checkpoints" / LAST
    assert _updates_of(last) == 6
    study([0, 2, 3, 6])
    export(str(last), str(model_path), str(tmp_path / "exported"))
    for name, value in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert (weights(6)[name] == value).all()
    study([0, 2, 3, 4])
    for one, other in [(2, 3), (3, 4)]:
        assert any((weights(one)[name] != value).any() for name, value in weights(other).items())


def test_a_table_of_other_columns_is_refused_and_one_of_these_read_as_it_was_written(tmp_path):
    rows = table.Key("lake", 0, 6).rows({"norm": Estimate(0.5, 0.25, 0.75)})
    table.write(tmp_path / "own.csv", rows)
    assert table.read(tmp_path / "own.csv") == rows
    (tmp_path / "old.csv").write_text("task,seed,age,loss,quantity,value,low,high\nlake,0,6,,norm,1,1,1\n")
    with pytest.raises(ConfigurationError, match=r"old\.csv must have the columns task, .*, code"):
        table.read(tmp_path / "old.csv")


def test_the_tables_name_every_loss_and_at_age_zero_nothing_is_stale(study, tmp_path):
    rows = study([0, 2])
    (run,) = report.runs(rows)
    assert report.losses(rows) == list(MENU)
    for quantity, fresh in {"ess_sequence": 1.0, "kl_behavior_current": 0.0, "clip_share": 0.0}.items():
        by_age = {age: row.value for age, row in report.curve(rows, run, quantity).items()}
        assert by_age[0] == pytest.approx(fresh, abs=1e-4)
        assert by_age[2] != by_age[0] or quantity == "clip_share"
    at_birth = {loss: report.curve(rows, run, "cosine", loss)[0].value for loss in MENU}
    assert len({round(value, 4) for value in at_birth.values()}) == 1
    assert all(loss in (tmp_path / "run.md").read_text() for loss in MENU)


@pytest.mark.parametrize(("later", "continued"), [([0, 2, 8], True), ([0, 2, 3, 8], False)])
def test_ages_added_later_are_those_of_a_run_that_was_not_stopped(study, commands, later, continued):
    """An iteration has 6 updates: the first study's last age is inside of one, and 3 is before its checkpoint."""
    whole = study(later, "whole")
    study([0, 2])
    extended = study(later)
    assert any("--ckpt_path" in argument for argument in commands[-1]) == continued
    assert [at(extended, age) for age in later] == [at(whole, age) for age in later]


def test_training_ends_where_nothing_is_left_to_write(study, tmp_path):
    study([0])
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["updates_000000"]
    study([0, 6], "other")
    shutil.rmtree(snapshot(tmp_path / "other" / "snapshots", 6))
    study([0, 6], "other")
    assert _updates_of(tmp_path / "other" / "train" / "checkpoints" / LAST) == 6


def test_a_line_that_is_cut_off_is_named(tmp_path):
    table.write(tmp_path / "own.csv", table.Key("lake", 0, 6).rows({"norm": Estimate(0.5, 0.25, 0.75)}))
    (tmp_path / "own.csv").write_text((tmp_path / "own.csv").read_text()[:-12])
    with pytest.raises(ConfigurationError, match=r"own\.csv, line 2 must have 10 values"):
        table.read(tmp_path / "own.csv")


@pytest.mark.parametrize(
    ("ages", "groups", "message"),
    [([6, 0], 2, "ages=.*increasing"), ([-1], 2, "ages=.*at least 0"), ([0], 1, "groups=1 must be at least 2")],
)
def test_settings_that_cannot_be_are_refused_by_name(ages, groups, message, model_path, tmp_path):
    with pytest.raises(ValueError, match=message):
        staleness(
            policy=str(model_path),
            run=tmp_path,
            seed=0,
            options=["-c", str(TINY)],
            ages=ages,
            groups=groups,
            results=tmp_path / "results.csv",
            picture=tmp_path / "results.png",
            train=main,
            code="abc",
        )
