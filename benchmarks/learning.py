"""What `make quickstart`, `make learn` and `make task` learn, for several seeds; finished runs are kept.

python -m benchmarks.learning quickstart --seeds 0 1 2 3 4
python -m benchmarks.learning quickstart --engine vllm --seeds 0 1
python -m benchmarks.learning learn --seeds 0
python -m benchmarks.learning task --tasks sokoban_simple search arithmetic --seeds 0 1 2

`--tables` only writes the tables of docs/learning.md and docs/tasks.md again.
"""

import argparse
import math
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from benchmarks import rows
from benchmarks.machine import same_commit
from benchmarks.pages import put_between, table
from freshper_lightning.callbacks.report import read_scalars

TARGETS = ("quickstart", "learn", "task")
QUICK_TASK = "frozenlake"
TASKS = (QUICK_TASK, "sokoban_simple", "sokoban_hard", "cliff_walking", "search", "arithmetic")
CONFIDENCE = 0.95
BEGIN, END = "<!-- {name}: written by `python -m benchmarks.learning` -->", "<!-- end of {name} -->"


@dataclass(frozen=True)
class Row:
    """One run: what its policy did on held-out instances before (after the warm start) and after."""

    target: str
    task: str
    engine: str
    seed: int
    sampled_before: float
    sampled_after: float
    greedy_before: float
    greedy_after: float
    return_before: float | None
    """Mean return of sampled episodes; none where it was not kept."""
    return_after: float | None
    greedy_return_before: float | None
    greedy_return_after: float | None
    environment_steps: int
    optimizer_steps: int
    share_replayed: float
    minutes: float
    """Of wall-clock, with warm start and evaluations, without the installation."""
    core_minutes: float | None
    """Of processor time, None where it was not kept; says more where other work shared the cores."""
    cores: int
    machine: str
    commit: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What a run is known by."""
        return self.target, self.task, self.engine, self.seed

    @property
    def gain(self) -> float:
        """Of sampled success."""
        return self.sampled_after - self.sampled_before


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for and not there yet, and write the tables."""
    options = _options(arguments)
    for seed in [] if options.tables else options.seeds:
        for task in options.tasks if options.target == "task" else (QUICK_TASK,):
            if (options.target, task, options.engine, seed) in {row.key for row in rows.read(options.table, Row)}:
                continue
            row = _run(options.target, task, options.engine, seed, options.folder)
            rows.write(options.table, [*rows.read(options.table, Row), row])  # others may have been written since
            print(row, flush=True)
    done = rows.read(options.table, Row)
    put_between(options.docs / "learning.md", {"runs": quickstarts(done)}, BEGIN, END)
    put_between(options.docs / "tasks.md", {"gains": gains(done), "returns": returns(done)}, BEGIN, END)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--tasks", choices=TASKS[1:], nargs="+", default=TASKS[1:])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--table", type=Path, default=Path("docs/results/learning.csv"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where learning.md and tasks.md are")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"), help="for files of its own")
    options = parser.parse_args(arguments)
    if options.target == "task" and options.engine != "transformers":
        parser.error(f"--engine={options.engine} must be transformers for task, whose table has no other")
    return options


def _run(target: str, task: str, engine: str, seed: int, folder: Path) -> Row:
    run = folder / f"{task if target == 'task' else target}-{engine}-{seed}"
    began, spent = time.monotonic(), _processor_seconds()
    variables = {"TASK": task, "SEED": seed, "ENGINE": engine, "RUN": run, "METHOD": "freshper", "ARGS": ""}
    with same_commit() as measured:
        subprocess.run(["make", target, *(f"{name}={value}" for name, value in variables.items())], check=True)
    minutes, core_minutes = (time.monotonic() - began) / 60, (_processor_seconds() - spent) / 60
    scalars = read_scalars(run / "freshper")
    sampled, greedy, sampled_return, greedy_return = (
        [round(scalars[f"evaluation/{mode}/{what}"][end][1], 6) for end in (0, -1)]
        for what in ("success", "return")
        for mode in ("sampled", "greedy")
    )
    return Row(
        target=target,
        task=task,
        engine=engine,
        seed=seed,
        sampled_before=sampled[0],
        sampled_after=sampled[1],
        greedy_before=greedy[0],
        greedy_after=greedy[1],
        return_before=sampled_return[0],
        return_after=sampled_return[1],
        greedy_return_before=greedy_return[0],
        greedy_return_after=greedy_return[1],
        environment_steps=round(scalars["rollout/environment_steps"][-1][1]),
        optimizer_steps=scalars["evaluation/sampled/success"][-1][0],
        share_replayed=round(scalars["replay/share_of_training"][-1][1], 3),
        minutes=round(minutes, 1),
        core_minutes=round(core_minutes, 1),
        cores=os.cpu_count() or 1,
        machine=platform.machine(),
        commit=measured(),
    )


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean at :data:`CONFIDENCE`; infinite for fewer than two values."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return -math.inf, math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return mean - half, mean + half


def quickstarts(done: Sequence[Row]) -> str:
    """One line for each run of FrozenLake by `make quickstart` and `make learn`."""
    columns = ("run", "seed", "before", "after", "gain, points", "greedy before", "greedy after")
    lines = [
        [row.target + (", vLLM" if row.engine == "vllm" else ""), str(row.seed), *_progress(row)]
        for row in done
        if row.target != "task"
    ]
    return table(columns, lines)


def _progress(row: Row) -> list[str]:
    greedy = [_percent(row.greedy_before), _percent(row.greedy_after)]
    return [_percent(row.sampled_before), _percent(row.sampled_after), f"{100 * row.gain:.1f}", *greedy]


def gains(done: Sequence[Row]) -> str:
    """One line for each task: success before and after, means over seeds, and the interval of the gain."""
    columns = ("task", "seeds", "before", "after", "gain, points", "95 % interval", "greedy before", "greedy after")
    return table((*columns, "core-minutes of a run"), (_gain(task, found) for task, found in _by_task(done)))


def _gain(task: str, found: Sequence[Row]) -> list[str]:
    low, high = interval([row.gain for row in found])
    return [
        f"`{task}`",
        ", ".join(str(row.seed) for row in found),
        _mean(found, lambda row: row.sampled_before, _percent),
        _mean(found, lambda row: row.sampled_after, _percent),
        f"{100 * statistics.fmean(row.gain for row in found):.1f}",
        f"{100 * low:.1f} to {100 * high:.1f}" if math.isfinite(low) else "of one seed: none",
        _mean(found, lambda row: row.greedy_before, _percent),
        _mean(found, lambda row: row.greedy_after, _percent),
        _mean(found, lambda row: row.core_minutes, "{:.0f}".format),
    ]


def returns(done: Sequence[Row]) -> str:
    """One line for each task: mean returns over seeds."""
    columns = ("task", "sampled before", "sampled after", "greedy before", "greedy after")
    of: tuple[Callable[[Row], float | None], ...] = (
        lambda row: row.return_before,
        lambda row: row.return_after,
        lambda row: row.greedy_return_before,
        lambda row: row.greedy_return_after,
    )
    counted = _by_task([row for row in done if row.return_before is not None])
    lines = [[f"`{task}`", *(_mean(found, one, "{:.2f}".format) for one in of)] for task, found in counted]
    return table(columns, lines)


def _by_task(done: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """In the order of :data:`TASKS`; `make quickstart` is the run of FrozenLake."""
    counted = [row for row in done if row.engine == "transformers" and row.target != "learn"]
    found = {task: [row for row in counted if row.task == task] for task in TASKS}
    return [(task, sorted(group, key=lambda row: row.seed)) for task, group in found.items() if group]


def _mean(found: Sequence[Row], of: Callable[[Row], float | None], shown: Callable[[float], str]) -> str:
    values = [value for row in found if (value := of(row)) is not None]
    return shown(statistics.fmean(values)) if values else "–"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
