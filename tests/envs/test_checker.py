"""Checkers that hang, crash or eat memory cost an error, and never a verdict."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from freshper_lightning.envs.checker import CheckerPool, CheckError, CheckLimits, shared_pool
from freshper_lightning.envs.questions import obvious
from freshper_lightning.errors import ConfigurationError

ENDLESS = "(10^9)!"
"""Takes hours to compare with a number, inside one multiplication that no exception reaches."""


@pytest.fixture(scope="module")
def pool():
    pool = CheckerPool(CheckLimits(checkers=2, check_seconds=60))
    yield pool
    pool.close()


def wait_until_gone(pids, seconds=20):
    end = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, "a checker lives on"
        time.sleep(0.05)


def test_a_check_that_hangs_is_ended_in_time_and_the_next_one_is_checked():
    pool = CheckerPool(CheckLimits(checkers=1, check_seconds=2))
    assert pool.check("1/2", r"\frac{2}{4}")
    (late,) = pool.pids()
    began = time.monotonic()
    with pytest.raises(CheckError, match=r"check of '\(10\^9\)!' against '42' took more than 2 s"):
        pool.check("42", ENDLESS)
    assert time.monotonic() - began < 20
    assert not psutil.pid_exists(late)
    assert pool.check("1/2", r"\frac{2}{4}")
    pool.close()


def test_a_process_that_dies_during_a_check_costs_that_check_only(pool):
    pool.check("2x+2", "2x")
    (victim, *_) = pool.pids()
    threading.Timer(1, os.kill, (victim, signal.SIGSEGV)).start()
    with pytest.raises(CheckError, match="its process ended with status -11"):
        pool.check("42", ENDLESS)
    assert pool.check("2x+2", "2(x+1)")


def test_a_process_that_died_while_idle_is_replaced(pool):
    pool.check("2x+2", "2x")
    for pid in pool.pids():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert pool.check("2x+2", "2(x+1)")


def test_a_check_that_takes_too_much_memory_is_ended():
    pool = CheckerPool(CheckLimits(checkers=1, check_seconds=60, mebibytes=20))
    with pytest.raises(CheckError, match="took more than 20 MiB"):
        pool.check("42", ENDLESS)
    assert pool.pids() == []


def test_threads_check_at_the_same_time_and_get_their_own_verdicts(pool):
    pairs = [(f"{number}/7", rf"\frac{{{number + number % 2}}}{{7}}") for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda pair: pool.check(*pair), pairs))
    assert verdicts == [number % 2 == 0 for number in range(40)]
    assert len(pool.pids()) <= 2


def test_a_checker_is_small_and_imports_neither_torch_nor_vllm(pool):
    pool.check("2x+2", "2x")
    for pid in pool.pids():
        loaded = {os.path.basename(mapped.path) for mapped in psutil.Process(pid).memory_maps()}
        assert not any("torch" in name or "vllm" in name for name in loaded)
        assert psutil.Process(pid).memory_info().rss < 250 * 2**20


def test_environments_share_a_pool_whose_processes_end_with_the_last_of_them():
    limits = CheckLimits(checkers=1, check_seconds=61)
    first, second = shared_pool(limits), shared_pool(limits)
    assert first is second
    assert shared_pool(CheckLimits(checkers=1, check_seconds=62)) is not first
    first.check("2x+2", "2x")
    pids = first.pids()
    del first
    gc.collect()
    assert second.pids() == pids
    del second
    gc.collect()
    wait_until_gone(pids)


SCRIPT = """
import os, sys
from freshper_lightning.envs.checker import CheckerPool, CheckLimits
pool = CheckerPool(CheckLimits(check_seconds=60))
pool.check("2x+2", "2x")
if sys.argv[1] == "fork":
    mine = pool.pids()
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.check("2x+2", "2(x+1)") and set(pool.pids()).isdisjoint(mine) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.check("2x+2", "2(x+1)") and pool.pids() == mine
print(*pool.pids(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["exit", "killed", "fork"])
def test_processes_end_with_the_run_and_a_forked_child_has_its_own(how):
    run = subprocess.run([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True, check=False)
    assert run.returncode == (-9 if how == "killed" else 0)
    pids = [int(pid) for pid in run.stdout.split()]
    assert pids
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [("1,000", "1000.0", True), ("42", "41", False), ("50", "50%", True), ("0.5", "50%", None), ("1/2", "0.5", None)],
)
def test_numbers_need_no_process(gold, answer, verdict):
    assert obvious(gold, answer) is verdict


@pytest.mark.parametrize("value", [0, -3, "10", True, float("inf"), float("nan"), None])
@pytest.mark.parametrize("name", ["checkers", "check_seconds", "mebibytes"])
def test_a_limit_that_is_not_a_number_above_0_is_refused_by_name(name, value):
    with pytest.raises(
        ConfigurationError, match=rf"{name}={value!r} must be a (whole number of at least 1|number above 0)"
    ):
        CheckLimits(**{name: value})


@pytest.mark.parametrize("name", ["checkers", "mebibytes"])
def test_what_counts_something_is_whole(name):
    with pytest.raises(ConfigurationError, match=rf"{name}=2\.5 must be a whole number of at least 1"):
        CheckLimits(**{name: 2.5})


def test_an_answer_whose_shape_breaks_the_check_is_wrong_and_not_an_error(pool):
    assert not pool.check("(1,2)", "1,2,2")  # math-verify zips the two
