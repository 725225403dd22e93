"""`freshper compare --study ess`: what stale trajectories are worth to the policies that learn from them."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freshper_lightning.compare.marker import Marker
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.processes import DivergedError, Processes, RunFailedError, locked
from freshper_lightning.compare.provenance import loaded, of_both
from freshper_lightning.compare.report import counted
from freshper_lightning.compare.run import WarmStartJob
from freshper_lightning.compare.schedule import Forecast, run_jobs
from freshper_lightning.compare.settings import Comparison, shown
from freshper_lightning.compare.stack import EPOCHS, Recipe, flat
from freshper_lightning.compare.tuning import CHOSEN, tuned
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.rollout.collector import TooManyFailuresError
from freshper_lightning.study import table
from freshper_lightning.study.sketch import DIMENSION
from freshper_lightning.study.snapshots import snapshot
from freshper_lightning.study.staleness import SNAPSHOTS, staleness

STUDIES = ("ess",)
TABLE, PICTURE = "staleness.csv", "staleness.png"


@dataclass(frozen=True)
class StudyRun:
    """One training run that is measured: the arm itself, or a variant of it."""

    seed: int
    variant: str
    """What it changes of the arm, in words; empty for the arm itself."""
    recipe: Recipe
    marker: Marker
    """Of its folder."""

    @property
    def name(self) -> str:
        """For the log."""
        return f"study of seed {self.seed}" + (f", {self.variant}" if self.variant else "")


def run_study(comparison: Comparison, folder: Path, seeds: Sequence[int], jobs: int) -> dict[str, str]:
    """Warm starts, then the study of each seed; what failed, by name.

    The arm trains at its chosen learning rate, where the folder has rates. Training is a process within the limits of
    the comparison. Measuring comes after it in this process, run after run, with all threads of the machine. What has
    been measured is kept, and training goes on where it was stopped.

    Raises:
        ConfigurationError: The arm or the warm start does not parse, the folder is of another study or has learning
            rates without the arm's, the table has numbers of a run whose folder is gone, or a variant is the arm itself
            or could not be trained.
    """
    arm = comparison.study.arm or comparison.baseline
    plan = Plan(comparison, folder, comparison.chosen([arm]))
    variants = _variants(comparison, tuned(folder / CHOSEN, plan, [arm])[arm])
    runs = [_run(plan, recipe, seed, variant) for seed in seeds for variant, recipe in variants.items()]
    warm = plan.warm_starts(seeds)
    for marker in (*(job.marker for job in warm), *(run.marker for run in runs)):
        marker.check()
    _require_folders(runs, folder / TABLE)
    loaded()
    _announce(comparison, len(seeds), len(variants) - 1)
    source = "was searched" if (folder / CHOSEN).exists() else "is that of the configuration: none was searched"
    print(f"the learning rate, {variants[''].learning_rate():g}, {source}", flush=True)
    processes = Processes(comparison.limits)
    failures = run_jobs(warm, processes, Forecast(jobs))
    failures |= {job.name: job.diverged for job in warm if job.diverged is not None}
    for run in runs:
        start = plan.start(run.seed)
        if isinstance(start, WarmStartJob) and not start.succeeded:
            failures[run.name] = "its warm start failed"
            continue
        try:
            _study(plan, run, processes)
        except (RunFailedError, TooManyFailuresError, ConfigurationError) as error:
            failures[run.name] = str(error)
            print(f"{run.name}: FAILED: {error}", flush=True)
        except BaseException:  # such as a signal, of which a process in a session of its own does not know
            processes.stop()
            raise
    if (folder / TABLE).exists():
        print(f"table: {folder / TABLE}\nreport: {(folder / TABLE).with_suffix('.md')}\npicture: {folder / PICTURE}")
    return failures


def _variants(comparison: Comparison, recipe: Recipe) -> dict[str, Recipe]:
    """The arm itself, without a name, and what is changed of it."""
    study = comparison.study
    if study.replay_updates and (own := recipe.replay_updates()) in study.replay_updates:
        raise ConfigurationError(f"study.replay_updates={study.replay_updates} must not have {own}, the arm's own")
    if 0 in study.replay_updates and not recipe.trains_without_replay():
        raise ConfigurationError(
            f"study.replay_updates={study.replay_updates} must not have 0: arms.{recipe.name} has {EPOCHS}=0"
        )
    rates = {f"learning rate x {shown(factor)}": recipe.at(factor * recipe.learning_rate()) for factor in study.factors}
    return {"": recipe} | rates | {f"K = {updates}": recipe.replaying(updates) for updates in study.replay_updates}


def _announce(comparison: Comparison, seeds: int, variants: int) -> None:
    ages, groups = comparison.study.ages, comparison.study.groups
    print(f"{comparison.task}: {counted(seeds, 'seed')}, each {ages[-1]} updates of training and then {len(ages)} ages")
    print(
        f"with {groups} groups of the probe and {2 * groups} fresh ones; the first shows how long it takes", flush=True
    )
    if variants:
        print(f"and the same training of {counted(variants, 'variant')}, with the probe alone", flush=True)


def _require_folders(runs: Sequence[StudyRun], results: Path) -> None:
    """Refuse numbers of a run whose folder is gone: of which configuration they are, nothing says any more."""
    measured = {(row.task, row.seed, row.variant) for row in table.read(results)}
    gone = [run for run in runs if (_environment(run), run.seed, run.variant) in measured and not run.marker.has_begun]
    if gone:
        raise ConfigurationError(
            f"{results} has numbers of the {gone[0].name}, but {gone[0].marker.folder}, where they were measured, is"
            " gone; remove these rows or the table, or give another --folder"
        )


def _environment(run: StudyRun) -> str:
    """Of the held-out episodes, by which the table names its task."""
    settings = flat(run.recipe.config)
    return str(settings.get("evaluation.environment.id") or settings["rollout.environment.id"])


def _study(plan: Plan, run: StudyRun, processes: Processes) -> None:
    start, study, folder = plan.start(run.seed), plan.comparison.study, run.marker.folder
    with locked(folder) as lock:
        try:
            run.marker.check()
        except ConfigurationError as error:
            raise RunFailedError(str(error)) from error
        run.marker.begin(goes_on=True)

        def train(arguments: Sequence[str]) -> None:
            """Not again where it has diverged: it would again."""
            begin = time.monotonic()
            if run.marker.diverged() is None:
                try:
                    processes.run(list(arguments), folder / "output.txt", lock)
                except DivergedError as error:
                    run.marker.finish(time.monotonic() - begin, diverged=str(error))

        staleness(
            policy=start if isinstance(start, str) else str(start.policy),
            run=folder,
            seed=run.seed,
            options=run.recipe.options,
            ages=study.ages,
            groups=study.groups,
            results=plan.folder / TABLE,
            picture=plan.folder / PICTURE,
            train=train,
            variant=run.variant,
            code=of_both(run.marker.begun_with(), loaded()),
        )
        lost = [age for age in study.ages if not snapshot(folder / SNAPSHOTS, age).exists()]
    if lost:
        reason = run.marker.diverged() or f"training has ended before them (output in {folder / 'output.txt'})"
        raise RunFailedError(f"ages from {lost[0]} on are not there: {reason}")


def _run(plan: Plan, recipe: Recipe, seed: int, variant: str) -> StudyRun:
    start = plan.start(seed)
    content = start if isinstance(start, str) else start.content
    measured = {"groups": plan.comparison.study.groups, "sketch": DIMENSION}
    found = {"seed": seed, "start": content, "fit": recipe.config} | measured
    place = plan.folder / "study" / re.sub(r"[^\w.+-]+", "_", variant)
    return StudyRun(seed, variant, recipe, Marker(place / f"seed-{seed}", found))
