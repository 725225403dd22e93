"""Jobs side by side, with an estimate of the time before and while they run."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from freshper_lightning.compare.processes import Processes, RunFailedError, StoppedError
from freshper_lightning.compare.run import Job
from freshper_lightning.compare.settings import Limits


def default_jobs(limits: Limits) -> int:
    """As many processes as cores and free memory allow, at least one."""
    jobs = _cores() // limits.threads
    memory = _free_gib()
    if memory is not None:
        jobs = min(jobs, int(memory / limits.memory_gib))
    return max(jobs, 1)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_gib() -> float | None:
    """Memory that could be had without swapping, in GiB; None where the system does not say."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] / 2**20 if found else None


@dataclass
class Forecast:
    """How long what is left will take: as long as what is finished, on average, over the number of jobs."""

    jobs: int
    seconds: list[float] = field(default_factory=list)
    """Of finished runs."""

    def left(self, runs: int) -> float | None:
        """Seconds for so many more runs, at least one; None as long as none is finished."""
        if not self.seconds:
            return None
        rounds = max(runs / self.jobs, 1.0)
        return rounds * sum(self.seconds) / len(self.seconds)

    def sentence(self, runs: int) -> str:
        """In words, with the time of day of the end."""
        if runs == 0:
            return "nothing left"
        left = self.left(runs)
        if left is None:
            return "no run is finished yet that the time could be estimated from"
        end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
        return f"about {duration(left)} left, expected end {end}"


def duration(seconds: float) -> str:
    """``90`` as ``1.5 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def run_jobs(
    jobs: Sequence[Job], processes: Processes, forecast: Forecast, finished: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Run what is not finished, as many at a time as the forecast says; returns what failed, and why, by name.

    Args:
        jobs: In the order in which they are begun.
        processes: Ended where this is interrupted.
        forecast: Learns how long a job takes.
        finished: Called after every job, whether it ended well or not.
    """
    waiting = [job for job in jobs if not job.finished]
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(forecast.jobs) as pool:
        running = {pool.submit(job, processes): job for job in waiting}
        try:
            for number, done in enumerate(as_completed(running), 1):
                _report(done, running[done], failures, forecast)
                finished()
                print(f"[{number}/{len(waiting)}] {forecast.sentence(len(waiting) - number)}", flush=True)
        except BaseException:
            print("stopping what runs; this takes some seconds", flush=True)
            for future in running:
                future.cancel()
            processes.stop()
            raise
    return failures


def _report(done: Future[float], job: Job, failures: dict[str, str], forecast: Forecast) -> None:
    name = job.name
    try:
        seconds = done.result()
    except RunFailedError as error:
        failures[name] = str(error)
        print(f"{name}: FAILED: {error}", flush=True)
    except StoppedError:
        failures[name] = "stopped"
    else:
        whole = job.marker.seconds()
        if seconds and whole is not None:  # another process may have finished it meanwhile, or another attempt begun it
            forecast.seconds.append(whole)
        print(f"{name}: {duration(seconds)}", flush=True)
