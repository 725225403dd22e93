"""One warm start and one run of one arm: made once, kept, and continued where they were killed."""

import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from freshper_lightning.checkpoint import LAST
from freshper_lightning.compare.marker import Marker
from freshper_lightning.compare.processes import DivergedError, Processes, RunFailedError, locked
from freshper_lightning.compare.stack import Recipe, flat, run_options
from freshper_lightning.errors import ConfigurationError


class Job(ABC):
    """Work with a folder of its own, which holds all of its result once it is finished, and is kept."""

    folder: Path
    processes = 1
    """How many it is at most, each with the limits of one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For the log."""

    @property
    @abstractmethod
    def marker(self) -> Marker:
        """What the folder belongs to."""

    @abstractmethod
    def _work(self, processes: Processes, lock: TextIO) -> None:
        """All of it, in processes that hold the lock."""

    @abstractmethod
    def _tidy(self) -> None:
        """Remove what is of no use any more, once the folder says that the work is finished."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.marker.finished

    @property
    def goes_on(self) -> bool:
        """Whether what another attempt has left is used."""
        return False

    @property
    def succeeded(self) -> bool:
        """Whether its result is there."""
        return self.finished and self.diverged is None

    @property
    def diverged(self) -> str | None:
        """Why there will never be a result; None where there is one or may be."""
        return self.marker.diverged()

    def __call__(self, processes: Processes) -> float:
        """Do it, or what is left of it; returns the seconds that this took.

        Raises:
            RunFailedError: A process of it failed, another comparison is at it, or has begun it with another
                configuration meanwhile.
            StoppedError: The comparison is being stopped.
        """
        start = time.monotonic()
        with locked(self.folder) as lock:
            if self.finished:
                return 0.0
            try:
                self.marker.check()
            except ConfigurationError as error:
                raise RunFailedError(str(error)) from error
            continued = self.goes_on
            self.marker.begin(continued)
            try:
                self._work(processes, lock)
            except DivergedError as error:
                self.marker.finish(time.monotonic() - start, diverged=str(error))
                raise
            seconds = time.monotonic() - start
            self.marker.finish(seconds, continued=continued)
            self._tidy()
        return seconds


@dataclass(frozen=True)
class WarmStartJob(Job):
    """The policy of a seed by the three commands of the quickstart: a tiny model, demonstrations, export."""

    seed: int
    folder: Path
    recipe: Recipe
    tiny: dict[str, Any]
    processes = 3

    @property
    def name(self) -> str:
        """For the log."""
        return f"warm start of seed {self.seed}"

    @property
    def policy(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / "policy"

    @property
    def content(self) -> dict[str, Any]:
        """What decides the policy."""
        return {"seed": self.seed, "tiny": self.tiny, "fit": self.recipe.config}

    @property
    def marker(self) -> Marker:
        """See :class:`Job`."""
        return Marker(self.folder, self.content)

    def _work(self, processes: Processes, lock: TextIO) -> None:
        base, output = self.folder / "base", self.folder / "output.txt"
        for part in (base, self.folder / "fit", self.policy):
            shutil.rmtree(part, ignore_errors=True)
        options = [f"--{key}={value}" for key, value in flat(self.tiny).items()] if self.tiny else []
        processes.run(["tiny", f"--path={base}", f"--spec.seed={self.seed}", *options], output, lock)
        fit = ["fit", *self.recipe.options, *run_options(self.seed, base, self.folder, "fit")]
        processes.run([*fit, "--rollout.engine.name=transformers"], output, lock)
        checkpoint = self.folder / "fit" / "checkpoints" / LAST
        export = [f"--checkpoint={checkpoint}", f"--model={base}", f"--path={self.policy}"]
        processes.run(["export", *export], output, lock)

    def _tidy(self) -> None:
        shutil.rmtree(self.folder / "fit" / "checkpoints", ignore_errors=True)


@dataclass(frozen=True)
class TrainingJob(Job):
    """One arm with one seed; logs and checkpoints are in the folder itself, and a killed run appends to them."""

    arm: str
    seed: int
    folder: Path
    recipe: Recipe
    start: str | WarmStartJob
    keep_checkpoints: bool

    @property
    def name(self) -> str:
        """For the log."""
        variant = self.folder.parent.name
        return f"{self.arm}{'' if variant == self.arm else f' {variant}'}, seed {self.seed}"

    @property
    def marker(self) -> Marker:
        """See :class:`Job`."""
        start = self.start if isinstance(self.start, str) else self.start.content
        return Marker(self.folder, {"seed": self.seed, "start": start, "fit": self.recipe.config})

    @property
    def _last(self) -> Path:
        return self.folder / "checkpoints" / LAST

    @property
    def goes_on(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self._last.exists()

    def _work(self, processes: Processes, lock: TextIO) -> None:
        if not self.goes_on:
            self._clear()
        resume = [f"--ckpt_path={self._last}"] if self.goes_on else []
        model = self.start if isinstance(self.start, str) else self.start.policy
        options = run_options(self.seed, model, self.folder.parent, self.folder.name)
        processes.run(["fit", *self.recipe.options, *options, *resume], self.folder / "output.txt", lock)

    def _tidy(self) -> None:
        if not self.keep_checkpoints:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)

    def _clear(self) -> None:
        """Logs of a run that was killed before its first checkpoint."""
        for events in self.folder.glob("events.out.tfevents.*"):
            events.unlink()
