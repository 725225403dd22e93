"""The same search of the learning rate for every arm, on seeds that the table does not have."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from freshper_lightning.compare.collect import rows_of
from freshper_lightning.compare.curves import curves_of
from freshper_lightning.compare.ledger import missing_evaluation, without
from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.run import TrainingJob
from freshper_lightning.compare.settings import shown
from freshper_lightning.compare.stack import Recipe, digest
from freshper_lightning.compare.statistics import ties
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.exclusive import exclusive

CHOSEN = "learning_rates.yaml"


@dataclass(frozen=True)
class Choice:
    """The rate of an arm, and what it was chosen from."""

    learning_rate: float
    results: dict[str, float]
    """Mean result over the seeds of the search, by factor."""
    digest: str
    """Of the arm's configuration before tuning, and of the search: runs, seeds, factors and measure."""

    @property
    def at_edge(self) -> bool:
        """Whether the best factor is the least or the greatest of several: a better one may lie beyond."""
        factors = [float(factor) for factor in self.results]
        best = _best({float(factor): result for factor, result in self.results.items()})
        return len(factors) > 1 and best in (min(factors), max(factors))


def trials(plan: Plan) -> dict[str, dict[float, list[TrainingJob]]]:
    """The runs of the search, by arm and factor."""
    tuning = plan.comparison.tuning

    def runs(recipe: Recipe, factor: float) -> list[TrainingJob]:
        tried = recipe.at(factor * recipe.learning_rate()).evaluated_on(tuning.instances)
        place = Path("tuning") / recipe.name / f"times_{shown(factor)}"
        return [plan.training(tried, seed, place) for seed in tuning.seeds]

    return {arm: {factor: runs(recipe, factor) for factor in tuning.factors} for arm, recipe in plan.recipes.items()}


def choose(plan: Plan, finished: Mapping[str, Mapping[float, Sequence[TrainingJob]]]) -> dict[str, Choice]:
    """The rate with the best mean result of each arm; of equal ones the one nearest to the arm's own.

    A rate at which a run diverged is the worst; an arm that has no other gets none. Runs must be whole: see
    :func:`incomplete`.
    """
    found = {
        arm: {factor: _result(plan, runs) for factor, runs in by_factor.items()} for arm, by_factor in finished.items()
    }
    return {arm: choice_of(plan, arm, results) for arm, results in found.items() if max(results.values()) > -math.inf}


def incomplete(task: str, runs: Iterable[TrainingJob]) -> dict[str, str]:
    """Which of the runs ended before their time, though without an error, and what their logs are without."""
    missing = {run.name: missing_evaluation(rows_of(task, run), run) for run in runs if run.succeeded}
    return {name: without(moment) for name, moment in missing.items() if moment}


def _result(plan: Plan, runs: Sequence[TrainingJob]) -> float:
    if any(run.diverged for run in runs):
        return -math.inf
    comparison = plan.comparison
    rows = [row for job in runs for row in rows_of(comparison.task, job)]
    curves = curves_of(rows, comparison.metric, comparison.mode)
    return float(np.mean([curve.final(comparison.tuning_window) for curve in curves]))


def _best(results: Mapping[float, float]) -> float:
    """Of those that are as good as the best one, the nearest to 1."""
    top = max(results.values())
    return min((factor for factor in results if ties(results[factor], top)), key=lambda factor: abs(np.log(factor)))


def choice_of(plan: Plan, arm: str, results: Mapping[float, float]) -> Choice:
    """Of mean results by factor."""
    recipe = plan.recipes[arm]
    best = _best(results)
    by_name = {shown(factor): result for factor, result in results.items()}
    return Choice(recipe.at(best * recipe.learning_rate()).learning_rate(), by_name, _digest(plan, recipe))


def _digest(plan: Plan, recipe: Recipe) -> str:
    comparison = plan.comparison
    tuning = comparison.tuning
    starts = [plan.training(recipe, seed, Path()).marker.config for seed in tuning.seeds]
    measured = (comparison.metric, comparison.mode, comparison.tuning_window, tuning.instances)
    return digest({"runs": starts, "factors": list(tuning.factors), "measure": measured})


def write_choices(path: Path, choices: Mapping[str, Choice]) -> None:
    """Add to the file, or replace in it, the choices of these arms."""
    unfinished = path.with_suffix(".tmp")
    with exclusive(path):
        OmegaConf.save({**_choices(path), **{arm: asdict(choice) for arm, choice in choices.items()}}, unfinished)
        unfinished.replace(path)


def is_chosen(path: Path, plan: Plan, arm: str) -> bool:
    """Whether the file has the rate that this search has found for the arm as it is configured now."""
    choice = _choices(path).get(arm)
    return choice is not None and choice["digest"] == _digest(plan, plan.recipes[arm])


def _choices(path: Path) -> dict[str, dict[str, Any]]:
    """What :func:`write_choices` wrote; nothing where there is no file.

    Raises:
        ConfigurationError: The file is damaged.
    """
    if not path.exists():
        return {}
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: remove it, or run --tune in another --folder") from error
    keys = {field.name for field in fields(Choice)}
    if not isinstance(found, dict) or any(not isinstance(one, dict) or set(one) != keys for one in found.values()):
        raise ConfigurationError(f"{path} must have {', '.join(sorted(keys))} of each arm: remove it, or restore it")
    return {str(arm): choice for arm, choice in found.items()}


def search_of(path: Path, plan: Plan) -> str:
    """Where the learning rates of the plan's arms come from, in a sentence."""
    choices, tuning = _choices(path), plan.comparison.tuning
    if not choices:
        return "Learning rates are those of the configuration; none was searched."
    found = {arm: Choice(**choices[arm]) for arm in plan.recipes}
    edge = [arm for arm, choice in found.items() if choice.at_edge]
    text = (
        f"The learning rate of each arm is the best of its own times {', '.join(map(shown, tuning.factors))} on seeds"
        f" {', '.join(map(str, tuning.seeds))}, none of which is here, and on other held-out instances."
    )
    return text + (
        f" At the least or greatest factor, where a better one may lie beyond: {', '.join(edge)}." if edge else ""
    )


def tuned(path: Path, plan: Plan, arms: Sequence[str] | None = None) -> dict[str, Recipe]:
    """The recipes of these arms, of all by default, at their chosen rates; as they are where nothing was tuned.

    Raises:
        ConfigurationError: Some arms are tuned and others are not, or an arm or the search has changed since.
    """
    found = {arm: plan.recipes[arm] for arm in arms or plan.recipes}
    if not path.exists():
        return dict(found)
    choices = _choices(path)
    for arm, recipe in found.items():
        if arm not in choices:
            raise ConfigurationError(
                f"{path} has no learning rate of {arm}: run --tune with it, leave it out by --arms, or remove the file"
            )
        if choices[arm]["digest"] != _digest(plan, recipe):
            raise ConfigurationError(
                f"{path}: arms.{arm}, where it starts or how rates are searched has changed since it was tuned: run"
                " --tune, or remove the file"
            )
    return {arm: recipe.at(float(choices[arm]["learning_rate"])) for arm, recipe in found.items()}
