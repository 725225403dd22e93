"""The study of staleness as a command: variants, stopping and going on, and what it refuses."""

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

from freshper_lightning.compare import provenance
from freshper_lightning.compare import study as study_command
from freshper_lightning.compare.processes import RunFailedError, locked
from freshper_lightning.rollout.collector import TooManyFailuresError
from freshper_lightning.study import measure
from freshper_lightning.study import table as staleness
from tests.command import WAIT, wait_until
from tests.compare.files import compare, diverging, edited


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
    study = {"arm": "freshper_50", "ages": [0, 2, 4, 6], "groups": 2, "factors": [3.0], "replay_updates": [0]}
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
    assert "the same training of 2 variants, with the probe alone" in said
    assert "seed 0, K = 0, age 6: " in said
    own, third, none = (
        OmegaConf.load(folder / "study" / place / "seed-0" / "train" / "config.yaml")
        for place in ("", "learning_rate_x_3", "K_0")
    )
    assert third.model.optimizer.init_args.lr == pytest.approx(3 * own.model.optimizer.init_args.lr)
    assert none.data.init_args.replay_updates == 0 != own.data.init_args.replay_updates
    study["replay_updates"] = [0]
    passes = {"settings": {"data": {"init_args": {"epochs": 0}}}}
    with pytest.raises(SystemExit, match=r"must not have 0: arms\.freshper_50 has data\.init_args\.epochs=0"):
        compare(edited(file, {"study": study, "arms": {"freshper_50": passes}}), tmp_path / "other", "--study=ess")
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
    variants = {"study": {"arm": "freshper_50", "ages": [0, 2], "groups": 2, "factors": [0.25]}}
    file, folder = edited(tmp_path / "compare.yaml", diverging(rate=0.005) | variants), tmp_path / "results"
    for _ in range(2):
        with pytest.raises(SystemExit, match="1 failed: study of seed 0;"):
            compare(file, folder, "--study=ess", "--seeds=1")
        said = capsys.readouterr().out
        assert "study of seed 0: FAILED: ages from 2 on are not there: diverged: " in said
    measured = {(row.variant, row.age) for row in staleness.read(folder / "staleness.csv")}
    assert measured == {("", 0), ("learning rate x 0.25", 0), ("learning rate x 0.25", 2)}
    assert (folder / "study" / "seed-0" / "output.txt").read_text().count("Seed set to") == 1
    assert (folder / "staleness.png").exists()


def test_a_run_that_cannot_be_measured_does_not_stop_the_others_and_is_tried_again(
    tiny_environment, tmp_path, monkeypatch, capsys
):
    variants = {"study": {"arm": "freshper_50", "ages": [0, 2], "groups": 2, "factors": [0.25]}}
    file, folder = edited(tmp_path / "compare.yaml", variants), tmp_path / "results"
    rows = measure.Study.rows

    def fails(study, key, *arguments):
        if key.age == 2 and not key.variant:
            raise TooManyFailuresError("an environment has failed")
        return rows(study, key, *arguments)

    monkeypatch.setattr(measure.Study, "rows", fails)
    with pytest.raises(SystemExit, match="1 failed: study of seed 0;"):
        compare(file, folder, "--study=ess", "--seeds=1")
    said = capsys.readouterr().out
    assert "study of seed 0: FAILED: an environment has failed" in said
    assert "the learning rate, 0.01, is that of the configuration: none was searched" in said
    measured = {(row.variant, row.age) for row in staleness.read(folder / "staleness.csv")}
    assert measured == {("", 0), ("learning rate x 0.25", 0), ("learning rate x 0.25", 2)}
    monkeypatch.setattr(measure.Study, "rows", rows)
    compare(file, folder, "--study=ess", "--seeds=1")
    rows_now = staleness.read(folder / "staleness.csv")
    assert {(row.variant, row.age) for row in rows_now} == measured | {("", 2)}
    assert {row.code for row in rows_now} == {provenance.loaded()}


def test_ages_that_training_does_not_come_to_are_a_failure(tiny_environment, tmp_path, capsys):
    short = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:00:00:00"}}
    ends = {
        "settings": {"trainer": {"callbacks": [short | {"init_args": {**short["init_args"], "interval": "epoch"}}]}}
    }
    few = {"study": {"arm": "freshper_50", "ages": [0, 1000], "groups": 2}}
    file, folder = edited(tmp_path / "compare.yaml", few | ends), tmp_path / "results"
    with pytest.raises(SystemExit, match="1 failed: study of seed 0;"):
        compare(file, folder, "--study=ess", "--seeds=1")
    said = capsys.readouterr().out
    assert re.search(r"FAILED: ages from \d+ on are not there: training has ended before them \(output in", said)


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
            {"factors": [3, 1]},
            r"study\.factors=\[3\.0, 1\.0\] must be factors above 0, different from one another in three digits",
        ),
        (
            {"factors": [0.3333, 0.33333]},
            r"study\.factors=.* must be factors above 0, different from one another in three digits and from 1",
        ),
        ({"replay_updates": [0, 0]}, r"study\.replay_updates=\[0, 0\] must be different numbers, at least 0"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused(tiny_environment, tmp_path, study, message):
    file = edited(tmp_path / "compare.yaml", {"study": study})
    with pytest.raises(SystemExit, match=message):
        compare(file, tmp_path / "results", "--study=ess")
