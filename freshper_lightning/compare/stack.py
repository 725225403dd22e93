"""From the arms of a comparison to the options of `freshper fit`, and to the configuration that these mean."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from freshper_lightning.cli import main
from freshper_lightning.compare.settings import MODES, Comparison, WarmStart
from freshper_lightning.errors import ConfigurationError, require_setting

LEARNING_RATE = "model.optimizer.init_args.lr"
LENGTH = "trainer.max_epochs"
REPLAY_UPDATES = "data.init_args.replay_updates"
EPOCHS = "data.init_args.epochs"


@dataclass(frozen=True)
class Recipe:
    """Options of `freshper fit` without model, seed and folders, and the whole configuration that they mean."""

    name: str
    options: tuple[str, ...]
    config: dict[str, Any]

    def learning_rate(self) -> float:
        """Of the optimizer.

        Raises:
            ConfigurationError: The arm does not say it.
        """
        return float(self._said(LEARNING_RATE))

    def replay_updates(self) -> int:
        """K of the method.

        Raises:
            ConfigurationError: The arm does not say it.
        """
        return int(self._said(REPLAY_UPDATES))

    def _said(self, key: str) -> Any:
        value = flat(self.config).get(key)
        if value is None:
            raise ConfigurationError(f"arms.{self.name}: {key} must be given: tuning and studies change it")
        return value

    def at(self, learning_rate: float) -> "Recipe":
        """The same at another learning rate, in six digits."""
        return self._but(LEARNING_RATE, float(f"{learning_rate:.6g}"))

    def trains_without_replay(self) -> bool:
        """Whether anything is left to do where K is 0."""
        return flat(self.config).get(EPOCHS) != 0

    def replaying(self, updates: int) -> "Recipe":
        """The same with another K."""
        return self._but(REPLAY_UPDATES, updates)

    def evaluated_on(self, instances: int) -> "Recipe":
        """The same with other held-out instances."""
        return self._but("evaluation.instances", instances)

    def _but(self, key: str, value: float) -> "Recipe":
        config = OmegaConf.create(self.config)
        OmegaConf.update(config, key, value)
        return Recipe(self.name, (*self.options, f"--{key}={value!r}"), _plain(config))


def recipes(comparison: Comparison, arms: Sequence[str], folder: Path) -> dict[str, Recipe]:
    """One for each arm, by name; each whole configuration is written to a file in ``folder``.

    Raises:
        ConfigurationError: An arm does not parse, or the arms differ in length or evaluations.
    """
    found = {}
    for name in arms:
        arm = comparison.arms[name]
        files = [*comparison.stack, *arm.stack]
        found[name] = _recipe(f"arms.{name}", name, files, [comparison.settings, arm.settings], folder)
        _require_evaluations(comparison, found[name])
    _require_alike(found, comparison.baseline)
    return found


def warm_start_recipe(comparison: Comparison, warm: WarmStart, folder: Path) -> Recipe:
    """Of the supervised training.

    Raises:
        ConfigurationError: It does not parse.
    """
    return _recipe("warm_start", "warm_start", [*comparison.stack, *warm.stack], [warm.settings], folder)


def _recipe(key: str, name: str, files: Sequence[str], settings: Sequence[dict[str, Any]], folder: Path) -> Recipe:
    """Runs read one file of their own, so that nobody changes what they train by changing a file that it came from."""
    with TemporaryDirectory() as place:
        own = Path(place) / f"{name}.yaml"
        OmegaConf.save(OmegaConf.merge(*map(OmegaConf.create, settings)), own)
        config = resolved(key, [part for file in [*files, str(own)] for part in ("-c", file)])
    path = folder / f"{name}-{digest(config)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # a process may be reading it, and its name says what is in it
        return Recipe(name, ("-c", str(path)), config)
    OmegaConf.save({key: value for key, value in config.items() if value is not None}, path)
    return Recipe(name, ("-c", str(path)), config)


def digest(config: Mapping[str, Any]) -> str:
    """Of a configuration: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def resolved(key: str, options: Sequence[str]) -> dict[str, Any]:
    """The whole configuration of a run, defaults included, as `--print_config` shows it for some seed and folders.

    Raises:
        ConfigurationError: The options do not parse; the message begins with ``key``.
    """
    shown, said = StringIO(), StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(said):
            main(["fit", *options, *run_options(0, "policy", Path("runs"), "run"), "--print_config"])
    except SystemExit as ended:
        if ended.code == 0:
            return _plain(OmegaConf.create(shown.getvalue()))
        message = ended.code if isinstance(ended.code, str) else said.getvalue()
        raise ConfigurationError(f"{key}: {message.strip().removeprefix('freshper: error: ')}") from ended
    raise AssertionError("--print_config did not end the command")


def _plain(config: DictConfig | ListConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(config)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _require_evaluations(comparison: Comparison, recipe: Recipe) -> None:
    evaluation, trainer = recipe.config["evaluation"], recipe.config["trainer"]
    iterations, every = trainer["max_epochs"], evaluation["every_n_iterations"]
    where = f"arms.{recipe.name}: trainer"
    require_setting(f"{where}.max_epochs", iterations, (iterations or 0) >= 1, "the number of iterations, at least 1")
    for key, off in (("max_steps", -1), ("max_time", None)):
        found = trainer.get(key, off)
        require_setting(f"{where}.{key}", found, found in (off, -1), f"left out: arms are equally long in {LENGTH}")
    if every is None:
        raise ConfigurationError("settings.evaluation.every_n_iterations must be given")
    modes = evaluation["modes"] or MODES
    if comparison.mode not in modes:
        raise ConfigurationError(f"mode={comparison.mode} must be one of settings.evaluation.modes={modes}")
    tuning = comparison.tuning
    if evaluation["instances"] == tuning.instances:
        raise ConfigurationError(f"tuning.instances={tuning.instances} must not be settings.evaluation.instances")
    windows = {"final_window": comparison.final_window, "tuning.final_window": comparison.tuning_window}
    for key, window in windows.items():
        if iterations < every * window:
            raise ConfigurationError(
                f"{key}={window} must be at most the evaluations of a run:"
                f" {iterations} iterations // every {every} = {iterations // every}"
            )


def _require_alike(found: Mapping[str, Recipe], baseline: str) -> None:
    def shared(recipe: Recipe) -> dict[str, Any]:
        config = recipe.config
        parts = {name: config[name] for name in ("evaluation", "rollout")}
        found = flat(parts) | {LENGTH: config["trainer"]["max_epochs"]}
        return {key: value for key, value in found.items() if key != "rollout.measure_drift"}

    for recipe in found.values():
        own, others = shared(recipe), shared(found[baseline])
        if different := sorted(key for key in own.keys() | others.keys() if own.get(key) != others.get(key)):
            key = different[0]
            raise ConfigurationError(
                f"arms.{recipe.name}.settings: {key}={own.get(key)} must be {others.get(key)} as in {baseline}: length,"
                " rollouts and evaluations are those of all arms, in settings"
            )


def run_options(seed: int, model: Path | str, parent: Path | str, name: str) -> list[str]:
    """Options of `freshper fit` that are above every configuration."""
    logger = "--trainer.logger.init_args"
    return [
        f"--seed_everything={seed}",
        f"--model.path={model}",
        f"{logger}.save_dir={parent}",
        f"{logger}.name={name}",
        f"{logger}.version=",
        "--trainer.enable_progress_bar=false",
    ]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; lists count as values."""
    if not isinstance(config, dict) or not config:
        return {prefix: config}
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
