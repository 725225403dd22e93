"""`freshper compare`."""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from freshper_lightning.compare.collect import Row, read_table
from freshper_lightning.compare.curves import curves_of
from freshper_lightning.compare.ledger import Ledger, by_run, require_whole
from freshper_lightning.compare.plan import Plan, check_seeds
from freshper_lightning.compare.processes import Processes
from freshper_lightning.compare.report import nothing_learned, write_report
from freshper_lightning.compare.run import Job, TrainingJob
from freshper_lightning.compare.schedule import Forecast, default_jobs, duration, run_jobs
from freshper_lightning.compare.settings import Comparison, read_comparison
from freshper_lightning.compare.study import STUDIES, run_study
from freshper_lightning.compare.tuning import (
    CHOSEN,
    choose,
    incomplete,
    is_chosen,
    search_of,
    trials,
    tuned,
    write_choices,
)
from freshper_lightning.errors import ConfigurationError, require_setting
from freshper_lightning.policy.net import require_model_folder

TABLE = "evaluations.csv"
SEEDS = 5
"""How many where --seeds does not say it."""
LEFT_OUT = "left out by --arms"


def main(arguments: Sequence[str]) -> None:
    """Run, continue or report a comparison; ends with exit code 1 where runs have failed.

    Raises:
        ConfigurationError: The file or an option cannot work; nothing has run.
    """
    options = _parser().parse_args(arguments)
    comparison = read_comparison(options.config)
    folder = options.folder or Path("runs/compare") / comparison.task
    if options.jobs is not None and options.jobs < 1:
        raise ConfigurationError(f"--jobs={options.jobs} must be at least 1")
    if options.table is not None:
        if options.seeds is not None:
            raise ConfigurationError(
                f"--seeds={options.seeds} must not be given with --table, of which all seeds count"
            )
        if options.folder is None:
            raise ConfigurationError(
                f"--folder must be given with --table: {folder} may hold the report of all that was run"
            )
        rows, left_out = _rows_of_table(options.table, comparison, options.arms)
        _report(rows, comparison, folder, left_out)
        return
    jobs = options.jobs or default_jobs(comparison.limits)
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        failures = _run_as_asked(options, comparison, folder, jobs)
    except KeyboardInterrupt:
        sys.exit("freshper: stopped; the same command goes on")
    finally:
        signal.signal(signal.SIGTERM, before)
    if failures:
        again = "the same command tries again what has neither diverged nor ended before its time"
        sys.exit(f"freshper: {len(failures)} failed: {'; '.join(failures)}; {again}")


def _report(
    rows: Sequence[Row], comparison: Comparison, folder: Path, missing: Mapping[str, str], search: str = ""
) -> None:
    print(f"report: {write_report(rows, comparison, folder, missing, search)}")
    own = [row for row in rows if row.task == comparison.task]
    if warning := nothing_learned(curves_of(own, comparison.metric, comparison.mode)):
        print(warning)


def _rows_of_table(path: Path, comparison: Comparison, arms: list[str] | None) -> tuple[list[Row], dict[str, str]]:
    """Those of the named arms and the baseline, of all where none is named; and which arms are left out."""
    rows = read_table(path)
    runs = by_run(rows, path)
    require_whole(
        {run: found for run, found in runs.items() if run[0] == comparison.task}, path, comparison.final_window
    )
    if arms is None:
        return rows, {}
    there = {arm for task, arm, _ in runs if task == comparison.task}
    known = ", ".join(sorted(there)) or "none"
    for arm in arms:
        require_setting("--arms", arm, arm in there, f"an arm that {path} has evaluations of: {known}")
    wanted = {*arms, comparison.baseline}
    return [row for row in rows if row.arm in wanted], dict.fromkeys(sorted(there - wanted), LEFT_OUT)


def _run_as_asked(options: argparse.Namespace, comparison: Comparison, folder: Path, jobs: int) -> dict[str, str]:
    if options.study and options.arms:
        raise ConfigurationError(f"--arms={options.arms} must not be given with --study, whose arm is study.arm")
    seeds = check_seeds(SEEDS if options.seeds is None else options.seeds, comparison)
    if comparison.model is not None:
        require_model_folder(comparison.model, "model")
    if options.study:
        return run_study(comparison, folder, seeds, jobs)
    plan = Plan(comparison, folder, comparison.chosen(options.arms))
    return _tune(plan, jobs) if options.tune else _compare(plan, seeds, jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="freshper compare", description="Arms x seeds of training, and a report.")
    parser.add_argument("-c", "--config", type=Path, required=True, help="YAML file of the comparison")
    parser.add_argument("--seeds", type=int, help=f"seeds 0 to N-1 (default: {SEEDS})")
    parser.add_argument("--arms", nargs="+", help="these and the baseline (default: all)")
    parser.add_argument("--folder", type=Path, help="results, kept and continued (default: runs/compare/TASK)")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: as cores and memory allow)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--tune", action="store_true", help="search the learning rate of every arm instead")
    instead.add_argument("--study", choices=STUDIES, help="measure what stale trajectories are worth instead")
    instead.add_argument("--table", type=Path, help="report this table of evaluations and run nothing")
    return parser


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _compare(plan: Plan, seeds: Sequence[int], jobs: int) -> dict[str, str]:
    runs = plan.runs(tuned(plan.folder / CHOSEN, plan), seeds)
    search = search_of(plan.folder / CHOSEN, plan)
    ledger = Ledger(plan.folder / TABLE, plan.comparison.task)
    left = ledger.lacks(runs)
    failures = _run(plan, runs, left, jobs, lambda: ledger.add(left))
    for name, reason in (lacking := ledger.add(left)).items():
        print(f"{name}: FAILED: {reason}")
    failures |= lacking
    failures |= {run.name: run.diverged for run in runs if run.diverged is not None}
    rows = ledger.rows(runs)
    if rows:
        print(f"table: {ledger.path}")
        missing = failures | dict.fromkeys(sorted(set(plan.comparison.arms) - set(plan.arms)), LEFT_OUT)
        _report(rows, plan.comparison, plan.folder, missing, search)
    return failures


def _tune(plan: Plan, jobs: int) -> dict[str, str]:
    path, found = plan.folder / CHOSEN, trials(plan)
    left = {arm: by_factor for arm, by_factor in found.items() if not is_chosen(path, plan, arm)}
    lacking: dict[str, str] = {}

    def collect() -> list[str]:
        """Write what can be chosen; returns the arms whose runs have ended without a rate that is any good."""
        ended = [arm for arm in left if all(run.finished for run in _all({arm: left[arm]}))]
        short = {arm: incomplete(plan.comparison.task, _all({arm: left[arm]})) for arm in ended}
        for names in short.values():
            lacking.update(names)
        whole = [arm for arm in ended if not short[arm]]
        for arm, choice in choose(plan, {arm: left[arm] for arm in whole}).items():
            del left[arm]
            write_choices(path, {arm: choice})
            edge = ", at the edge of tuning.factors: a better one may lie beyond" if choice.at_edge else ""
            results = ", ".join(f"{_result(result)} at x {factor}" for factor, result in choice.results.items())
            print(f"{arm}: learning rate {choice.learning_rate:.3g} ({results}){edge}", flush=True)
        return [arm for arm in whole if arm in left]

    trying = _all(left)
    failures = _run(plan, _all(found), trying, jobs, collect)
    hopeless = collect()
    for name, reason in lacking.items():
        print(f"{name}: FAILED: {reason}")
    diverged = {run.name for run in trying if run.diverged}
    failures = {name: reason for name, reason in failures.items() if name not in diverged} | lacking
    failures |= dict.fromkeys(hopeless, "diverged at every factor: give tuning.factors a smaller one")
    if not failures:
        print(f"chosen: {path}")
    return failures


def _result(result: float) -> str:
    return f"{result:.4g}" if math.isfinite(result) else "diverged"


def _all(found: Mapping[str, Mapping[float, Sequence[TrainingJob]]]) -> list[TrainingJob]:
    return [run for by_factor in found.values() for group in by_factor.values() for run in group]


def _run(
    plan: Plan,
    runs: Sequence[TrainingJob],
    unrecorded: Sequence[TrainingJob],
    jobs: int,
    finished: Callable[[], object],
) -> dict[str, str]:
    """Warm starts, then the unrecorded of all runs, where their warm start is there; what failed, by name."""
    left = [run for run in unrecorded if not run.finished]
    warm = plan.warm_starts(sorted({run.seed for run in left}))
    for job in [*warm, *unrecorded]:
        job.marker.check()
    known = [run.marker.seconds() for run in runs if run.succeeded]
    forecast = Forecast(jobs, [seconds for seconds in known if seconds is not None])
    _announce(plan.comparison, warm, left, len(runs), forecast)
    processes = Processes(plan.comparison.limits)
    failures = run_jobs(warm, processes, Forecast(jobs))
    failures |= {job.name: job.diverged for job in warm if job.diverged is not None}
    ready = [run for run in left if isinstance(run.start, str) or run.start.succeeded]
    failures |= {run.name: "its warm start failed" for run in left if run not in ready}
    return failures | run_jobs(ready, processes, forecast, finished)


def _announce(
    comparison: Comparison, warm: Sequence[Job], left: Sequence[Job], number: int, forecast: Forecast
) -> None:
    starts = [job for job in warm if not job.finished]
    minutes = comparison.limits.core_minutes
    most = None if minutes is None else sum(job.processes for job in [*left, *starts]) * minutes * 60
    bound = "" if most is None else f"; at most {duration(most)} of processor time"
    print(
        f"{comparison.task}: {len(left)} of {number} runs to do, {len(starts)} warm starts, {forecast.jobs} at a time"
    )
    print(f"{forecast.sentence(len(left))}{bound}", flush=True)
