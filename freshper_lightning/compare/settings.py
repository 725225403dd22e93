"""What a comparison is: the keys of its YAML file, read and checked before anything runs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from freshper_lightning.errors import ConfigurationError, require_setting

METRICS = ("success", "return")
MODES = ("sampled", "greedy")
APART = "different from one another in three digits"
"""What factors of a learning rate must be: runs are named by three of their digits."""


@dataclass
class Arm:
    """One method: configuration files and settings on top of what all arms share."""

    stack: list[str] = field(default_factory=list)
    """Files above the common stack and below the common settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of `freshper fit`, on top of everything."""


@dataclass
class WarmStart:
    """How the policy that all arms of a seed start from is made: `freshper tiny`, supervised `fit`, `export`."""

    tiny: dict[str, Any] = field(default_factory=dict)
    """Options of `freshper tiny`; path and seed are given."""
    stack: list[str] = field(default_factory=list)
    """Files above the common stack."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of `freshper fit`, on top."""


def shown(factor: float) -> str:
    """A factor of a learning rate in the names of runs."""
    return f"{factor:.3g}"


def distinct(factors: Sequence[float]) -> bool:
    """Whether runs at these factors have different names."""
    return len({shown(factor) for factor in factors}) == len(factors)


@dataclass
class Limits:
    """What one process may take; how many run at a time follows from it."""

    core_minutes: float | None = None
    """Processor time of one attempt at a run, which fails above it; a continued run is a new attempt. None: any."""
    memory_gib: float = 2.0
    """Memory that a run needs."""
    threads: int = 1
    """Threads of a run."""

    def __post_init__(self) -> None:
        minutes = self.core_minutes
        require_setting("limits.core_minutes", minutes, minutes is None or minutes > 0, "above 0, or null")
        require_setting("limits.memory_gib", self.memory_gib, self.memory_gib > 0, "above 0")
        require_setting("limits.threads", self.threads, self.threads >= 1, "at least 1")


@dataclass
class Tuning:
    """The same search for every arm, on seeds that the table does not have."""

    seeds: list[int] = field(default_factory=lambda: [1000])
    """Seeds of the search."""
    factors: list[float] = field(default_factory=lambda: [1 / 3, 1.0, 3.0])
    """Multiples of the arm's learning rate."""
    instances: int = 1
    """Held-out instances of the search, as `evaluation.instances` names them: others than the table's."""
    final_window: int | None = None
    """Evaluations at the end of a run whose mean says how good its rate is; as many as in the table by default."""

    def __post_init__(self) -> None:
        require_setting(
            "tuning.seeds", self.seeds, len(set(self.seeds)) == len(self.seeds) > 0, "different, at least one"
        )
        positive = bool(self.factors) and min(self.factors) > 0
        require_setting("tuning.factors", self.factors, positive and 1.0 in self.factors, "above 0, with 1 among them")
        require_setting("tuning.factors", self.factors, distinct(self.factors), APART)
        window = self.final_window
        require_setting("tuning.final_window", window, window is None or window >= 1, "at least 1")


@dataclass
class StudySettings:
    """What `--study` trains and measures."""

    arm: str = ""
    """The arm whose training is studied; the baseline where none is named."""
    ages: list[int] = field(default_factory=lambda: [0, 6, 12, 24, 48, 96])
    """Applied updates after which the policy is measured."""
    groups: int = 64
    """Groups of the frozen probe, and of each half of the fresh episodes."""
    factors: list[float] = field(default_factory=list)
    """Multiples of the arm's learning rate at which it is trained as well, to see how fast data age there."""
    replay_updates: list[int] = field(default_factory=list)
    """The same for other values of `data.replay_updates`."""

    def __post_init__(self) -> None:
        ages = sorted(set(self.ages))
        require_setting("study.ages", self.ages, ages == self.ages and ages[:1] == [0], "in order, with 0 first")
        require_setting("study.groups", self.groups, self.groups >= 2, "at least 2")
        rates, updates = self.factors, self.replay_updates
        other = all(factor > 0 for factor in rates) and distinct([1.0, *rates])
        require_setting("study.factors", rates, other, f"factors above 0, {APART} and from 1")
        counts = all(number >= 0 for number in updates) and len(set(updates)) == len(updates)
        require_setting("study.replay_updates", updates, counts, "different numbers, at least 0")


@dataclass
class Comparison:
    """Arms that differ in nothing but what their own keys say.

    Raises:
        ConfigurationError: A value is out of range, or the baseline is not one of the arms.
    """

    task: str = MISSING
    """Its name in the table."""
    stack: list[str] = MISSING
    """Files of `freshper fit` below every arm; paths as on the command line."""
    arms: dict[str, Arm] = MISSING
    """Methods by name."""
    baseline: str = MISSING
    """The arm that others are compared with, and that fixes the threshold."""
    references: list[str] = field(default_factory=list)
    """Further arms that differences are shown from."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of `freshper fit` that all arms share, above their stacks: the length and the evaluations."""
    warm_start: WarmStart | None = None
    """How the policy of each seed is made; or else ``model``."""
    model: str | None = None
    """Folder of the checkpoint that all seeds start from, where there is no warm start."""
    metric: str = "success"
    """``success`` or ``return`` of the held-out episodes."""
    mode: str = "sampled"
    """``sampled`` or ``greedy``: which evaluations the measures are of; the table has both."""
    final_window: int = 3
    """Evaluations at the end of a run whose mean is its result."""
    threshold: float = 0.9
    """Share of the baseline's final-window mean that the environment steps are counted to."""
    keep_checkpoints: bool = False
    """Whether a finished run keeps its checkpoints."""
    limits: Limits = field(default_factory=Limits)
    tuning: Tuning = field(default_factory=Tuning)
    study: StudySettings = field(default_factory=StudySettings)

    def __post_init__(self) -> None:
        require_setting("arms", list(self.arms), len(self.arms) > 0, "at least one arm")
        for name in self.arms:
            require_setting(
                "arms",
                name,
                re.fullmatch(r"[^\W_][\w.+-]*", name) is not None,
                "a letter or digit, and then letters, digits and _.+-",
            )
        named = ", ".join(self.arms)
        require_setting("baseline", self.baseline, self.baseline in self.arms, f"one of the arms: {named}")
        for name in self.references:
            others = ", ".join(arm for arm in self.arms if arm != self.baseline)
            require_setting("references", name, name in self.arms and name != self.baseline, f"some of {others}")
        require_setting("study.arm", self.study.arm, self.study.arm in ("", *self.arms), f"one of the arms: {named}")
        require_setting("metric", self.metric, self.metric in METRICS, " or ".join(METRICS))
        require_setting("mode", self.mode, self.mode in MODES, " or ".join(MODES))
        require_setting("final_window", self.final_window, self.final_window >= 1, "at least 1")
        require_setting("threshold", self.threshold, self.threshold > 0, "above 0")
        if (self.warm_start is None) == (self.model is None):
            raise ConfigurationError("exactly one of warm_start and model must be given: where all arms start from")

    @property
    def tuning_window(self) -> int:
        """Evaluations at the end of a run of the search that count."""
        return self.tuning.final_window or self.final_window

    def chosen(self, names: list[str] | None) -> list[str]:
        """The arms to run, the baseline first; all of them where none are named.

        Raises:
            ConfigurationError: One of them is unknown.
        """
        for name in names or ():
            require_setting("--arms", name, name in self.arms, f"one of {', '.join(self.arms)}")
        wanted = set(self.arms if names is None else [*names, self.baseline])
        return sorted((name for name in self.arms if name in wanted), key=lambda name: name != self.baseline)


def read_comparison(path: str | Path) -> Comparison:
    """The comparison of a YAML file; variables such as ``${oc.env:NAME}`` are resolved.

    Raises:
        ConfigurationError: The file or one of the files that it names is not there, a key is unknown, missing or there
            twice, or a value is not allowed; the message names file and key.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"--config={path} is not a file")
    try:
        read = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        require_setting("the file", read, isinstance(read, dict), "keys and their values")
        comparison = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Comparison), read))
    except (OmegaConfBaseException, ConfigurationError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {_sentence(error)}") from error
    assert isinstance(comparison, Comparison)
    _require_files(path, comparison)
    return comparison


def _sentence(error: Exception) -> str:
    """What is wrong, on one line, with the whole key first where the message ends with it."""
    lines = [line.strip() for line in str(error).splitlines()]
    keys = [line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")]
    marks = ("full_key: ", "object_type=", "reference_type=")
    told = " ".join(line for line in lines if line and not line.startswith(marks))
    if missing := re.search(r"missing mandatory value: (\w+)", told):
        return f"{missing[1]} must be given"
    return f"{keys[0]}: {told}" if keys and keys[0] else told


def _require_files(path: str | Path, comparison: Comparison) -> None:
    stacks = {"stack": comparison.stack}
    stacks |= {f"arms.{name}.stack": arm.stack for name, arm in comparison.arms.items()}
    if comparison.warm_start is not None:
        stacks["warm_start.stack"] = comparison.warm_start.stack
    for key, files in stacks.items():
        for file in files:
            if not Path(file).is_file():
                raise ConfigurationError(f"{path}: {key}: {file} is not a file; paths are from {Path.cwd()}")
