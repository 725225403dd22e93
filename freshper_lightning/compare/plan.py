"""Which jobs a comparison is made of, and where each of them lives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from freshper_lightning.compare.run import TrainingJob, WarmStartJob
from freshper_lightning.compare.settings import Comparison
from freshper_lightning.compare.stack import Recipe, recipes, warm_start_recipe
from freshper_lightning.errors import ConfigurationError


@dataclass(frozen=True)
class Plan:
    """A comparison and its folder; every arm parses, before anything runs.

    Raises:
        ConfigurationError: By the properties: an arm or the warm start does not parse.
    """

    comparison: Comparison
    folder: Path
    arms: Sequence[str]

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """By arm, as configured."""
        return recipes(self.comparison, self.arms, self.folder / "settings")

    @cached_property
    def _warm_start(self) -> Recipe | None:
        warm = self.comparison.warm_start
        return None if warm is None else warm_start_recipe(self.comparison, warm, self.folder / "settings")

    def warm_starts(self, seeds: Sequence[int]) -> list[WarmStartJob]:
        """One for each seed; none where all start from a given model."""
        warm, recipe = self.comparison.warm_start, self._warm_start
        if warm is None or recipe is None:
            return []
        return [WarmStartJob(seed, self.folder / "warm_start" / f"seed-{seed}", recipe, warm.tiny) for seed in seeds]

    def start(self, seed: int) -> str | WarmStartJob:
        """What all arms of a seed start from."""
        made = self.warm_starts([seed])
        return made[0] if made else str(self.comparison.model)

    def training(self, recipe: Recipe, seed: int, place: Path) -> TrainingJob:
        """One run, below ``place`` of the folder."""
        path = self.folder / place / f"seed-{seed}"
        return TrainingJob(recipe.name, seed, path, recipe, self.start(seed), self.comparison.keep_checkpoints)

    def runs(self, found: dict[str, Recipe], seeds: Sequence[int]) -> list[TrainingJob]:
        """All runs of the table: seed by seed, and the baseline first in each."""
        return [self.training(recipe, seed, Path("runs") / arm) for seed in seeds for arm, recipe in found.items()]


def check_seeds(seeds: int, comparison: Comparison) -> range:
    """The seeds of the table.

    Raises:
        ConfigurationError: There is none, or one of them is a seed of the tuning.
    """
    if seeds < 1:
        raise ConfigurationError(f"--seeds={seeds} must be at least 1")
    both = sorted(set(range(seeds)) & set(comparison.tuning.seeds))
    if both:
        raise ConfigurationError(f"tuning.seeds={comparison.tuning.seeds} must not be seeds of the table: {both}")
    return range(seeds)
