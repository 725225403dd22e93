"""How many at a time, for how long, and what happens to those that are running when all of it is stopped."""

import sys
import threading
import time

import pytest

from freshper_lightning.compare import processes as module
from freshper_lightning.compare import schedule
from freshper_lightning.compare.processes import Processes, RunFailedError, StoppedError, locked
from freshper_lightning.compare.schedule import Forecast, default_jobs, duration
from freshper_lightning.compare.settings import Limits
from tests.command import wait_until


@pytest.mark.parametrize(
    ("free", "limits", "jobs"),
    [
        (10.0, {"threads": 2, "memory_gib": 0.5}, 4),
        (10.0, {"threads": 1, "memory_gib": 3}, 3),
        (10.0, {"threads": 3, "memory_gib": 5}, 2),
        (None, {"threads": 1, "memory_gib": 3}, 8),
        (None, {"threads": 2, "memory_gib": 1e6}, 4),
        (10.0, {"threads": 9, "memory_gib": 0.5}, 1),
        (10.0, {"threads": 1, "memory_gib": 11}, 1),
    ],
)
def test_as_many_run_at_a_time_as_cores_and_memory_allow(monkeypatch, free, limits, jobs):
    monkeypatch.setattr(schedule, "_cores", lambda: 8)
    monkeypatch.setattr(schedule, "_free_gib", lambda: free)
    assert default_jobs(Limits(**limits)) == jobs


def test_cores_and_free_memory_of_this_machine_are_known_or_not():
    assert schedule._cores() >= 1
    free = schedule._free_gib()
    assert free is None or 0 < free < 1e5


def test_the_forecast_is_the_mean_of_what_is_finished_over_the_jobs():
    assert Forecast(2).left(4) is None
    assert Forecast(2, [10, 30]).left(4) == 40
    assert Forecast(8, [10, 30]).left(4) == 20
    assert Forecast(2, [10]).sentence(0) == "nothing left"
    assert "expected end" in Forecast(2, [10]).sentence(3)
    assert "no run is finished yet" in Forecast(2).sentence(3)
    assert [duration(seconds) for seconds in (9, 90, 5400)] == ["9 s", "1.5 min", "1.5 h"]


def test_a_command_that_ends_badly_says_where_its_output_is(tmp_path):
    with (
        locked(tmp_path) as lock,
        pytest.raises(RunFailedError, match=r"exit code 1; .*checkpoint='no' is not a file") as failed,
    ):
        Processes(Limits()).run(["export", "--checkpoint=no", "--model=m", "--path=p"], tmp_path / "output.txt", lock)
    assert str(tmp_path / "output.txt") in str(failed.value)


def test_a_process_runs_the_code_of_the_one_that_starts_it_and_not_that_of_the_current_folder(tmp_path, monkeypatch):
    decoy = tmp_path / "here" / "freshper_lightning"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('another freshper')")
    monkeypatch.chdir(decoy.parent)
    with locked(tmp_path) as lock:
        Processes(Limits()).run(["tiny", "--help"], tmp_path / "output.txt", lock)
    assert "usage: freshper tiny" in (tmp_path / "output.txt").read_text()


def test_what_is_running_ends_when_all_is_stopped(tmp_path):
    processes, ended = Processes(Limits()), []

    def run():
        with locked(tmp_path) as lock, pytest.raises(StoppedError):
            processes.run(["tiny", f"--path={tmp_path}", "--episodes=1000000"], tmp_path / "output.txt", lock)
        ended.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until((tmp_path / "output.txt").exists, thread.is_alive)
        time.sleep(0.3)
    finally:
        processes.stop()
        thread.join(module.PATIENCE)
    assert ended
    with locked(tmp_path) as lock, pytest.raises(StoppedError):
        processes.run(["tiny"], tmp_path / "output.txt", lock)


def test_a_lock_is_held_by_one_and_free_afterwards(tmp_path):
    with locked(tmp_path), pytest.raises(RunFailedError, match="in use by another process"), locked(tmp_path):
        sys.exit("two holders of one lock")
    with locked(tmp_path):
        pass
