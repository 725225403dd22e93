"""`freshper compare --study ess`: what stale trajectories are worth to the policies that learn from them."""

from collections.abc import Sequence
from pathlib import Path

from freshper_lightning.compare.marker import Marker
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.processes import Processes, locked
from freshper_lightning.compare.schedule import Forecast, run_jobs
from freshper_lightning.compare.settings import Comparison
from freshper_lightning.compare.stack import Recipe
from freshper_lightning.study.staleness import staleness

STUDIES = ("ess",)
TABLE, PICTURE = "staleness.csv", "staleness.png"


def run_study(comparison: Comparison, folder: Path, seeds: Sequence[int], jobs: int) -> dict[str, str]:
    """Warm starts, then the study of each seed whose warm start is there; what failed, by name.

    One seed after another in this process: what takes the time is measured with the threads of the machine. What has
    been measured is kept, and training goes on where it was stopped.

    Raises:
        ConfigurationError: The arm or the warm start does not parse, or the folder is of another study.
    """
    study, arm = comparison.study, comparison.study.arm or comparison.baseline
    plan = Plan(comparison, folder, comparison.chosen([arm]))
    recipe, warm = plan.recipes[arm], plan.warm_starts(seeds)
    markers = {seed: Marker(folder / "study" / f"seed-{seed}", _content(plan, recipe, seed)) for seed in seeds}
    for marker in (*(job.marker for job in warm), *markers.values()):
        marker.check()
    failures = run_jobs(warm, Processes(comparison.limits), Forecast(jobs))
    for seed, marker in markers.items():
        start = plan.start(seed)
        if not isinstance(start, str) and not start.finished:
            continue
        with locked(marker.folder):
            marker.begin()
            staleness(
                configs=[],
                policy=start if isinstance(start, str) else str(start.policy),
                run=str(marker.folder),
                seed=seed,
                options=recipe.options,
                ages=study.ages,
                groups=study.groups,
                results=str(folder / TABLE),
                picture=str(folder / PICTURE),
            )
    print(f"table: {folder / TABLE}\nreport: {(folder / TABLE).with_suffix('.md')}\npicture: {folder / PICTURE}")
    return failures


def _content(plan: Plan, recipe: Recipe, seed: int) -> dict[str, object]:
    start = plan.start(seed)
    content = start if isinstance(start, str) else start.content
    return {"seed": seed, "start": content, "fit": recipe.config, "groups": plan.comparison.study.groups}
