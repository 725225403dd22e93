"""A whole comparison on the tiny run: one arm is killed, continued, kept, and guarded against other settings."""

import csv
import re
import shutil

import pytest
from omegaconf import OmegaConf

from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.cli import main
from freshper_lightning.compare.ledger import Ledger
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.processes import Processes, RunFailedError, locked
from freshper_lightning.compare.settings import read_comparison
from tests.command import ROOT, environment
from tests.compare.files import compare, diverging, edited

KILLED = {
    "arms": {
        "freshper_50": {"settings": {"trainer": {"plugins": [{"class_path": "tests.compare.killing.KilledOnce"}]}}}
    }
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, model_path):
    """File and folder of a comparison whose second arm was killed once; message and page then, and page at the end."""
    path = tmp_path_factory.mktemp("comparison")
    file, folder = edited(path / "compare.yaml", KILLED), path / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, value in environment(model_path, path).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as failed:
            compare(file, folder, "--seeds=1")
        first = (folder / "report.md").read_text()
        compare(file, folder, "--seeds=1")
    return file, folder, str(failed.value), first, (folder / "report.md").read_text()


def table(folder):
    with (folder / "evaluations.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_failed_run_is_reported_and_does_not_stop_the_others(comparison):
    _, _, message, report, _ = comparison
    assert "1 failed: freshper_50, seed 0" in message
    assert re.search(r"^- freshper_50, seed 0: exit code -9", report, re.MULTILINE)
    assert "| on_policy | 1 |" in report


def test_a_killed_run_goes_on_from_its_checkpoint(comparison):
    folder = comparison[1] / "runs" / "freshper_50" / "seed-0"
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    rollouts = read_scalars(folder)["rollout/environment_steps"]
    assert len(rollouts) == 2
    assert (folder / "output.txt").read_text().count("rollouts run on") == 2
    assert not (folder / "checkpoints").exists()


def test_the_table_has_every_evaluation_of_every_run_once(comparison):
    rows = table(comparison[1])
    moments = [(row["arm"], row["seed"], row["mode"], row["iteration"], row["update"]) for row in rows]
    expected = [
        (arm, "0", mode, str(iteration), str(iteration * updates))
        for arm, updates in (("on_policy", 2), ("freshper_50", 6))
        for mode in ("sampled", "greedy")
        for iteration in range(3)
    ]
    assert sorted(moments) == sorted(expected)
    assert all(0 <= float(row["success"]) <= 1 and float(row["return"]) >= 0 for row in rows)
    for arm in ("on_policy", "freshper_50"):
        own = [row for row in rows if row["arm"] == arm and row["mode"] == "sampled"]
        for axis in ("environment_steps", "seconds"):
            assert [float(row[axis]) for row in own] == sorted({float(row[axis]) for row in own})


def test_the_report_has_every_arm(comparison):
    report = comparison[-1]
    assert "Not there" not in report
    assert report.count("| on_policy | 1 |") == report.count("| freshper_50 | 1 |") == 1


@pytest.fixture
def again(comparison, tiny_environment):
    return comparison[:2]


def test_finished_runs_are_kept(again, capsys):
    file, folder = again
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}
    compare(file, folder, "--seeds=1")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    said = capsys.readouterr().out
    assert "hash: 0 of 2 runs to do, 0 warm starts, 1 at a time" in said


def test_the_time_is_estimated_from_finished_runs(again, capsys):
    """Two more runs, which use up their processor time before they have begun."""
    file, folder = again
    more = edited(file.parent / "more.yaml", KILLED | {"limits": {"core_minutes": 0.01}})
    with pytest.raises(SystemExit, match=r"2 failed: on_policy, seed 1; freshper_50, seed 1"):
        compare(more, folder, "--seeds=2")
    said = capsys.readouterr().out
    assert re.search(r"hash: 2 of 4 runs to do.*\nabout .* left, expected end .*; at most 1 s of processor time", said)
    assert "on_policy, seed 1: FAILED: more than limits.core_minutes=0.01" in said
    assert re.search(r"\[1/2\] about .* left, expected end", said)


def test_a_changed_configuration_is_refused(again):
    file, folder = again
    changed = edited(file.parent / "changed.yaml", KILLED | {"settings": {"data": {"init_args": {"alpha": 0.3}}}})
    with pytest.raises(SystemExit, match=r"runs/on_policy/seed-0 holds .*alpha was 0\.6 and is 0\.3"):
        compare(changed, folder, "--seeds=1")


def test_a_run_of_a_table_from_elsewhere_is_not_run_again(again, comparison, tmp_path, capsys):
    file, folder = again
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(folder / "evaluations.csv", elsewhere)
    compare(file, elsewhere, "--seeds=1")
    assert "hash: 0 of 2 runs to do" in capsys.readouterr().out
    assert (elsewhere / "evaluations.csv").read_text() == (folder / "evaluations.csv").read_text()
    assert (elsewhere / "report.md").read_text() == comparison[-1]
    assert not (elsewhere / "runs").exists()
    changed = edited(tmp_path / "changed.yaml", KILLED | {"settings": {"data": {"init_args": {"alpha": 0.3}}}})
    with pytest.raises(SystemExit, match=r"evaluations\.csv holds on_policy, seed 0 of another configuration"):
        compare(changed, elsewhere, "--seeds=1")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:-1], r"without the greedy evaluation of iteration 2; remove the rest of it"),
        (
            lambda lines: [*lines, lines[-1]],
            r"has the greedy evaluation of iteration 2 of on_policy, seed 0 of hash twice",
        ),
        (lambda lines: [*lines[:-1], lines[-1][:12]], r"evaluations\.csv, line 13 must have 14 values"),
        (lambda lines: [*lines, lines[0]], r"evaluations\.csv, line 14: seed=seed must be a whole number"),
        (
            lambda lines: [*lines[:-1], re.sub(",[0-9a-f]{16},", ",another,", lines[-1])],
            r"has on_policy, seed 0 of hash with configurations [0-9a-f]{16} and another",
        ),
        (lambda lines: [*lines, "é"], r"evaluations\.csv'?: line 14 is not UTF-8"),
        (lambda lines: [lines[0].replace(",config", ""), *lines[1:]], r"evaluations\.csv must have the columns task,"),
    ],
)
def test_a_damaged_table_is_refused(again, tmp_path, damage, message):
    file, folder = again
    lines = (folder / "evaluations.csv").read_text().splitlines()
    assert len(lines) == 13
    (tmp_path / "evaluations.csv").write_text("\n".join(damage(lines)) + "\n", encoding="latin-1")
    with pytest.raises(SystemExit, match=message):
        compare(file, tmp_path, "--seeds=1")


def test_a_second_comparison_in_the_folder_neither_loses_rows_nor_mixes_configurations(again, tmp_path):
    file, folder = again
    comparison = read_comparison(file)
    plan = Plan(comparison, folder, comparison.chosen(None))
    one, other = plan.runs(plan.recipes, [0])
    first, second = (Ledger(tmp_path / "evaluations.csv", "hash") for _ in range(2))
    first.add([one])
    second.add([other])
    assert {row.arm for row in first.rows([one, other])} == {"on_policy", "freshper_50"}
    changed = read_comparison(
        edited(tmp_path / "c.yaml", KILLED | {"settings": {"data": {"init_args": {"alpha": 0.3}}}})
    )
    before = {path: path.read_bytes() for path in (folder / "settings").iterdir()}
    elsewhere = Plan(changed, folder, ["on_policy"])
    (late,) = elsewhere.runs(elsewhere.recipes, [0])
    assert {path: path.read_bytes() for path in before} == before
    assert not late.finished
    with pytest.raises(RunFailedError, match=r"alpha was 0\.6 and is 0\.3"):
        late(Processes(comparison.limits))


def test_a_tuned_comparison_is_searched_once_and_anew_where_the_search_has_changed(tiny_environment, tmp_path, capsys):
    few = {"tuning": {"seeds": [100], "factors": [1]}, "settings": {"trainer": {"max_epochs": 1}}}
    file, folder = edited(tmp_path / "compare.yaml", few), tmp_path / "results"
    compare(file, folder, "--tune")
    said = capsys.readouterr().out
    assert "hash: 2 of 2 runs to do" in said
    assert re.search(r"on_policy: learning rate 0\.01 \(\S+ at x 1\)", said)
    compare(file, folder, "--tune")
    assert "hash: 0 of 2 runs to do" in capsys.readouterr().out
    few["tuning"]["factors"] = [1, 2]
    compare(edited(file, few), folder, "--tune", "--arms", "on_policy")
    assert "hash: 1 of 2 runs to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="freshper_50, where it starts or how rates are searched has changed"):
        compare(file, folder, "--seeds=1")


def test_a_table_keeps_the_runs_of_other_arms(again, capsys):
    file, folder = again
    before = table(folder)
    compare(file, folder, "--seeds=1", "--arms", "on_policy")
    assert table(folder) == before
    page = (folder / "report.md").read_text()
    assert "- freshper_50: left out by --arms" in page
    assert "| freshper_50" not in page
    compare(file, folder, "--seeds=1")


def test_a_report_can_be_made_of_the_table_alone(again, comparison, tmp_path):
    file, folder = again
    compare(file, tmp_path / "report", "--table", str(folder / "evaluations.csv"))
    rates = " Learning rates are those of the configuration; none was searched."
    assert (tmp_path / "report" / "report.md").read_text() == comparison[-1].replace(rates, "")
    assert rates in comparison[-1]
    compare(file, tmp_path / "few", "--table", str(folder / "evaluations.csv"), "--arms", "on_policy")
    page = (tmp_path / "few" / "report.md").read_text()
    assert "| on_policy | 1 |" in page
    assert "- freshper_50: left out by --arms" in page
    assert "| freshper_50" not in page
    with pytest.raises(SystemExit, match=r"--folder must be given with --table: runs/compare/hash may hold the report"):
        main(["compare", "-c", str(file), "--table", str(folder / "evaluations.csv")])
    long = edited(tmp_path / "long.yaml", KILLED | {"final_window": 3})
    with pytest.raises(SystemExit, match=r"final_window=3 must be at most the evaluations of .*, seed 0 .*: 2"):
        compare(long, tmp_path / "few", "--table", str(folder / "evaluations.csv"))
    lines = [line for line in (folder / "evaluations.csv").read_text().splitlines() if "freshper_50" not in line]
    (tmp_path / "part.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit, match=r"--seeds=1 must not be given with --table"):
        compare(file, tmp_path / "few", "--table", str(tmp_path / "part.csv"), "--seeds=1")
    (tmp_path / "short.csv").write_text("\n".join((folder / "evaluations.csv").read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(SystemExit, match=r"short\.csv has on_policy, seed 0 of hash without the greedy .* iteration 2"):
        compare(file, tmp_path / "few", "--table", str(tmp_path / "short.csv"))
    with pytest.raises(SystemExit, match=r"--arms=freshper_50 must be an arm that .*part\.csv has .*: on_policy"):
        compare(file, tmp_path / "few", "--table", str(tmp_path / "part.csv"), "--arms", "freshper_50")


def test_a_run_that_ended_early_is_named_every_time_and_leaves_no_rows(tiny_environment, tmp_path, capsys):
    early = {"trainer": {"callbacks": [{"class_path": "tests.compare.killing.EndsEarly"}]}}
    file = edited(tmp_path / "compare.yaml", {"arms": {"freshper_50": {"settings": early}}})
    for number in (2, 0):
        with pytest.raises(SystemExit, match=r"1 failed: freshper_50, seed 0; "):
            compare(file, tmp_path / "results", "--seeds=1")
        said = capsys.readouterr().out
        assert f"hash: {number} of 2 runs to do" in said
        assert "freshper_50, seed 0: FAILED: its logs are without the sampled evaluation of iteration 2" in said
        assert {row["arm"] for row in table(tmp_path / "results")} == {"on_policy"}


def test_a_run_of_the_search_that_ended_early_is_no_result(tiny_environment, tmp_path, capsys):
    early = {"trainer": {"callbacks": [{"class_path": "tests.compare.killing.EndsEarly"}]}}
    changes = {"arms": {"freshper_50": {"settings": early}}, "tuning": {"factors": [1]}}
    file = edited(tmp_path / "compare.yaml", changes)
    with pytest.raises(SystemExit, match=r"1 failed: freshper_50 times_1, seed 100; "):
        compare(file, tmp_path / "results", "--tune")
    said = capsys.readouterr().out
    assert "freshper_50 times_1, seed 100: FAILED: its logs are without the sampled evaluation of iteration 2" in said
    assert list(OmegaConf.load(tmp_path / "results" / "learning_rates.yaml")) == ["on_policy"]


def test_a_folder_in_use_is_left_alone(again, capsys):
    file, folder = again
    with (
        locked(folder / "runs" / "on_policy" / "seed-1"),
        pytest.raises(SystemExit, match="1 failed: on_policy, seed 1"),
    ):
        compare(file, folder, "--seeds=2", "--arms", "on_policy")
    assert "is in use by another process" in capsys.readouterr().out


def test_a_rate_that_diverges_is_the_worst_and_is_not_tried_again(tiny_environment, tmp_path, capsys):
    file, folder = edited(tmp_path / "compare.yaml", diverging(rate=0.02)), tmp_path / "results"
    compare(file, folder, "--tune")
    said = capsys.readouterr().out
    assert re.search(r"freshper_50 times_3, seed 100: FAILED: diverged: .*the loss of a fresh batch is nan", said)
    assert re.search(r"freshper_50: learning rate 0\.01 \([\d.]+ at x 1, diverged at x 3\)", said)
    (folder / "learning_rates.yaml").unlink()
    compare(file, folder, "--tune")
    assert "hash: 0 of 4 runs to do" in capsys.readouterr().out


def test_runs_that_diverge_are_named_every_time_and_leave_no_rows(tiny_environment, tmp_path, capsys):
    file, folder = edited(tmp_path / "compare.yaml", diverging(rate=0.001)), tmp_path / "results"
    for number in (2, 0):
        with pytest.raises(
            SystemExit, match=r"1 failed: freshper_50, seed 0; .*what has neither diverged nor ended before its time"
        ):
            compare(file, folder, "--seeds=1")
        assert f"hash: {number} of 2 runs to do" in capsys.readouterr().out
        assert re.search("^- freshper_50, seed 0: diverged: ", (folder / "report.md").read_text(), re.MULTILINE)
    assert {row["arm"] for row in table(folder)} == {"on_policy"}
    with pytest.raises(SystemExit, match=r"1 failed: freshper_50; "):
        compare(file, folder, "--tune")
    assert "on_policy: learning rate" in capsys.readouterr().out
