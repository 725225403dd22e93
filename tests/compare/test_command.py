"""A whole comparison on the tiny run: one arm is killed, continued, kept, and guarded against other settings."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from omegaconf import OmegaConf

from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.cli import main
from freshper_lightning.compare import study as study_command
from freshper_lightning.compare.ledger import Ledger
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.processes import Processes, RunFailedError, locked
from freshper_lightning.compare.settings import read_comparison
from freshper_lightning.study import table as staleness
from tests.command import ROOT, WAIT, environment, wait_until
from tests.compare.files import edited

KILLED = {
    "arms": {
        "freshper_50": {"settings": {"trainer": {"plugins": [{"class_path": "tests.compare.killing.KilledOnce"}]}}}
    }
}


def compare(file, folder, *options):
    main(["compare", "-c", str(file), "--folder", str(folder), "--jobs=1", *options])


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
        (lambda lines: [*lines, lines[0]], r"evaluations\.csv, line 14: seed=seed must be a number"),
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
    assert "freshper_50" not in (folder / "report.md").read_text()
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


def test_a_study_measures_the_policies_that_the_comparison_starts_from_and_goes_on(tiny_environment, tmp_path, capsys):
    few = {"study": {"arm": "freshper_50", "ages": [0, 3], "groups": 2}}
    file, folder = edited(tmp_path / "compare.yaml", few), tmp_path / "results"
    compare(file, folder, "--study=ess", "--seeds=1")
    first = (folder / "staleness.csv").read_text()
    assert {line.split(",")[3] for line in first.splitlines()[1:]} == {"0", "3"}
    few["study"]["ages"] = [0, 3, 5]
    compare(edited(file, few), folder, "--study=ess", "--seeds=1")
    assert (folder / "staleness.csv").read_text().startswith(first)
    assert "seed 0, age 5: " in capsys.readouterr().out
    few["study"]["groups"] = 3
    with pytest.raises(SystemExit, match="groups was 2 and is 3"):
        compare(edited(file, few), folder, "--study=ess", "--seeds=1")
    shutil.rmtree(folder / "study" / "seed-0")
    with pytest.raises(
        SystemExit, match=r"has numbers of the study of seed 0, but .*seed-0, where they were measured, is gone"
    ):
        compare(file, folder, "--study=ess", "--seeds=1")


def test_a_study_trains_the_arm_at_other_rates_and_numbers_of_replays_too(tiny_environment, tmp_path, capsys):
    study = {"arm": "freshper_50", "ages": [0, 2, 4, 6], "groups": 2, "learning_rates": [3.0], "replay_updates": [0]}
    file, folder = edited(tmp_path / "compare.yaml", {"study": study}), tmp_path / "results"
    compare(file, folder, "--study=ess", "--seeds=1")
    rows = staleness.read(folder / "staleness.csv")
    itself, faster, alone = ("", "learning rate x 3", "K = 0")
    moved = {
        (row.variant, row.age): row.value for row in rows if row.quantity == "variance_token" and row.age in (0, 6)
    }
    assert moved[itself, 0] == moved[faster, 0] == moved[alone, 0]
    assert moved[faster, 6] > 2 * moved[itself, 6] > 2 * moved[itself, 0]
    assert moved[alone, 6] != moved[itself, 6]
    assert {row.variant for row in rows if row.quantity in ("cosine", "return")} == {itself}
    page = (folder / "staleness.md").read_text()
    assert re.search(r"\| token, learning rate x 3 \| \d+, .* \| (linear|quadratic) \| 2-4: ", page)
    said = capsys.readouterr().out
    assert "2 variants of it with the probe alone" in said
    assert "seed 0, K = 0, age 6: " in said
    own, third, none = (
        OmegaConf.load(folder / "study" / place / "seed-0" / "train" / "config.yaml")
        for place in ("", "learning_rate_x_3", "K_0")
    )
    assert third.model.optimizer.init_args.lr == pytest.approx(3 * own.model.optimizer.init_args.lr)
    assert none.data.init_args.replay_updates == 0 != own.data.init_args.replay_updates
    study["replay_updates"] = [2]
    with pytest.raises(SystemExit, match=r"study\.replay_updates=\[2\] must not have 2, the arm's own"):
        compare(edited(file, {"study": study}), tmp_path / "other", "--study=ess", "--seeds=1")


def test_a_study_that_was_begun_with_another_configuration_meanwhile_is_refused(
    tiny_environment, tmp_path, monkeypatch
):
    few = {"study": {"arm": "freshper_50", "ages": [0, 2], "groups": 2}}
    file, folder = edited(tmp_path / "compare.yaml", few), tmp_path / "results"
    faster = {"settings": {"model": {"optimizer": {"init_args": {"lr": 0.05}}}}}
    other = edited(tmp_path / "other.yaml", few | faster)
    announce = study_command._announce

    def meanwhile(*arguments):
        monkeypatch.setattr(study_command, "_announce", announce)
        compare(other, folder, "--study=ess", "--seeds=1")

    monkeypatch.setattr(study_command, "_announce", meanwhile)
    with pytest.raises(SystemExit, match="1 failed: study of seed 0"):
        compare(file, folder, "--study=ess", "--seeds=1")
    with pytest.raises(SystemExit, match=r"lr was 0\.05 and is 0\.01"):
        compare(file, folder, "--study=ess", "--seeds=1")


def test_a_study_whose_arm_diverges_measures_its_variants_and_does_not_try_again(tiny_environment, tmp_path, capsys):
    bound = {"class_path": "tests.compare.killing.DivergesAbove", "init_args": {"rate": 0.005}}
    settings = {"arms": {"freshper_50": {"settings": {"trainer": {"callbacks": [bound]}}}}}
    variants = {"study": {"arm": "freshper_50", "ages": [0, 2], "groups": 2, "learning_rates": [0.25]}}
    file, folder = edited(tmp_path / "compare.yaml", settings | variants), tmp_path / "results"
    for _ in range(2):
        with pytest.raises(SystemExit, match="1 failed: study of seed 0;"):
            compare(file, folder, "--study=ess", "--seeds=1")
    assert {row.variant for row in staleness.read(folder / "staleness.csv")} == {"learning rate x 0.25"}
    assert (folder / "study" / "seed-0" / "output.txt").read_text().count("Seed set to") == 1
    assert (folder / "staleness.png").exists()


def written(output):
    return output.exists() and output.stat().st_size > 0


def free(folder):
    try:
        with locked(folder):
            return True
    except RunFailedError:
        return False


def test_a_study_that_is_stopped_ends_its_training(tiny_environment, tmp_path):
    few = {"study": {"arm": "freshper_50", "ages": [0, 100_000], "groups": 2}}
    file, folder = edited(tmp_path / "compare.yaml", few), tmp_path / "results"
    output, running = folder / "study" / "seed-0" / "output.txt", threading.Event()

    def stop():
        deadline = time.monotonic() + WAIT
        while running.is_set() and not written(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        if running.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    running.set()
    threading.Thread(target=stop, daemon=True).start()
    try:
        with pytest.raises(SystemExit, match="stopped; the same command goes on"):
            compare(file, folder, "--study=ess", "--seeds=1")
    finally:
        running.clear()
    with locked(output.parent):
        assert written(output), f"the study has not begun in {WAIT} s"


def test_the_processes_of_a_comparison_that_is_killed_end_soon(tiny_environment, tmp_path):
    few = {"study": {"arm": "freshper_50", "ages": [0, 100_000], "groups": 2}, "limits": {"core_minutes": 30}}
    file, folder = edited(tmp_path / "compare.yaml", few), tmp_path / "results"
    output = folder / "study" / "seed-0" / "output.txt"
    command = [sys.executable, "-m", "freshper_lightning", "compare", "-c", file, "--folder", folder, "--study=ess"]
    with subprocess.Popen([*command, "--seeds=1", "--jobs=1"]) as killed:
        try:
            wait_until(lambda: written(output), lambda: killed.poll() is None)
            with pytest.raises(RunFailedError, match="is in use"), locked(output.parent):
                pass
        finally:
            killed.kill()
    wait_until(lambda: free(output.parent))


def diverging(rate):
    bound = {"class_path": "tests.compare.killing.DivergesAbove", "init_args": {"rate": rate}}
    return {"arms": {"freshper_50": {"settings": {"trainer": {"callbacks": [bound]}}}}}


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
        with pytest.raises(SystemExit, match=r"1 failed: freshper_50, seed 0; .*what has not diverged"):
            compare(file, folder, "--seeds=1")
        assert f"hash: {number} of 2 runs to do" in capsys.readouterr().out
        assert re.search("^- freshper_50, seed 0: diverged: ", (folder / "report.md").read_text(), re.MULTILINE)
    assert {row["arm"] for row in table(folder)} == {"on_policy"}
    with pytest.raises(SystemExit, match=r"1 failed: freshper_50; "):
        compare(file, folder, "--tune")
    assert "on_policy: learning rate" in capsys.readouterr().out


def test_what_a_study_fails_of_is_said(tiny_environment, tmp_path, capsys):
    few = {"study": {"arm": "freshper_50", "ages": [0, 3], "groups": 2}}
    file, folder = edited(tmp_path / "compare.yaml", few), tmp_path / "results"
    with locked(folder / "study" / "seed-0"), pytest.raises(SystemExit, match="1 failed: study of"):
        compare(file, folder, "--study=ess", "--seeds=1")
    assert re.search("study of seed 0: FAILED: .* is in use", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"--arms=\['freshper_50'\] must not be given with --study"):
        compare(file, folder, "--study=ess", "--arms", "freshper_50")
    with pytest.raises(SystemExit):
        compare(file, folder, "--study=ess", "--tune")
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"arm": "nobody"}, r"study\.arm=nobody must be one of the arms: "),
        ({"ages": [3, 6]}, r"study\.ages=\[3, 6\] must be in order, with 0 first"),
        ({"groups": 1}, r"study\.groups=1 must be at least 2"),
        (
            {"learning_rates": [3, 1]},
            r"study\.learning_rates=\[3\.0, 1\.0\] must be factors above 0, different from one another in three digits",
        ),
        (
            {"learning_rates": [0.3333, 0.33333]},
            r"study\.learning_rates=.* must be factors above 0, different from one another in three digits and from 1",
        ),
        ({"replay_updates": [0, 0]}, r"study\.replay_updates=\[0, 0\] must be different numbers, at least 0"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused(tiny_environment, tmp_path, study, message):
    file = edited(tmp_path / "compare.yaml", {"study": study})
    with pytest.raises(SystemExit, match=message):
        compare(file, tmp_path / "results", "--study=ess")
