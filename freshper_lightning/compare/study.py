"""`freshper compare --study ess`: what stale trajectories are worth to the policies that learn from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from freshper_lightning.compare.marker import Marker
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.processes import Processes, RunFailedError, locked
from freshper_lightning.compare.run import WarmStartJob
from freshper_lightning.compare.schedule import Forecast, run_jobs
from freshper_lightning.compare.settings import Comparison
from freshper_lightning.compare.stack import Recipe
from freshper_lightning.compare.tuning import CHOSEN, tuned
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.study import table
from freshper_lightning.study.sketch import DIMENSION
from freshper_lightning.study.staleness import staleness

STUDIES = ("ess",)
TABLE, PICTURE = "staleness.csv", "staleness.png"


def run_study(comparison: Comparison, folder: Path, seeds: Sequence[int], jobs: int) -> dict[str, str]:
    """Warm starts, then the study of each seed; what failed, by name.

    The arm trains at its chosen learning rate, where the folder has rates. Training is a process within the limits of
    the comparison. Measuring comes after it in this process, seed after
    seed, with all threads of the machine. What has been measured is kept, and training goes on where it was stopped.

    Raises:
        ConfigurationError: The arm or the warm start does not parse, the folder is of another study or has learning
            rates without the arm's, or the table has numbers of a seed whose folder is gone.
    """
    arm = comparison.study.arm or comparison.baseline
    plan = Plan(comparison, folder, comparison.chosen([arm]))
    recipe = tuned(folder / CHOSEN, plan, [arm])[arm]
    warm, markers = plan.warm_starts(seeds), {seed: _marker(plan, recipe, seed) for seed in seeds}
    for marker in (*(job.marker for job in warm), *markers.values()):
        marker.check()
    _require_folders(markers, folder / TABLE)
    ages, groups = comparison.study.ages, comparison.study.groups
    print(f"{comparison.task}: {len(seeds)} seeds, each {ages[-1]} updates of training and then {len(ages)} ages with")
    print(f"{groups} groups of the probe and {2 * groups} fresh ones; the first shows how long it takes", flush=True)
    processes = Processes(comparison.limits)
    failures = run_jobs(warm, processes, Forecast(jobs))
    failures |= {job.name: job.diverged for job in warm if job.diverged is not None}
    for seed, marker in markers.items():
        start, name = plan.start(seed), f"study of seed {seed}"
        if isinstance(start, WarmStartJob) and not start.succeeded:
            failures[name] = "its warm start failed"
            continue
        try:
            _study(plan, recipe, seed, marker, processes)
        except RunFailedError as error:
            failures[name] = str(error)
            print(f"{name}: FAILED: {error}", flush=True)
        except BaseException:  # such as a signal, of which a process in a session of its own does not know
            processes.stop()
            raise
    if (folder / TABLE).exists():
        print(f"table: {folder / TABLE}\nreport: {(folder / TABLE).with_suffix('.md')}\npicture: {folder / PICTURE}")
    return failures


def _require_folders(markers: Mapping[int, Marker], results: Path) -> None:
    """Refuse numbers of a seed whose folder is gone: of which configuration they are, nothing says any more."""
    measured = {row.seed for row in table.read(results)}
    gone = [seed for seed, marker in markers.items() if seed in measured and not marker.has_begun]
    if gone:
        raise ConfigurationError(
            f"{results} has numbers of seed {gone[0]}, but {markers[gone[0]].folder}, where they were measured, is"
            " gone; remove these rows or the table, or give another --folder"
        )


def _study(plan: Plan, recipe: Recipe, seed: int, marker: Marker, processes: Processes) -> None:
    start, study = plan.start(seed), plan.comparison.study
    with locked(marker.folder) as lock:
        marker.begin(goes_on=True)
        staleness(
            policy=start if isinstance(start, str) else str(start.policy),
            run=marker.folder,
            seed=seed,
            options=recipe.options,
            ages=study.ages,
            groups=study.groups,
            results=plan.folder / TABLE,
            picture=plan.folder / PICTURE,
            train=lambda arguments: processes.run(list(arguments), marker.folder / "output.txt", lock),
        )


def _marker(plan: Plan, recipe: Recipe, seed: int) -> Marker:
    start = plan.start(seed)
    content = start if isinstance(start, str) else start.content
    measured = {"groups": plan.comparison.study.groups, "sketch": DIMENSION}
    found = {"seed": seed, "start": content, "fit": recipe.config} | measured
    return Marker(plan.folder / "study" / f"seed-{seed}", found)
