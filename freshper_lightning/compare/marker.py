"""What a folder was run with and whether that was finished: two small files, each whole or not there."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshper_lightning.compare.provenance import code, of_both
from freshper_lightning.compare.stack import digest, flat
from freshper_lightning.errors import ConfigurationError

SHOWN = 3
"""Differences that an error names."""


@dataclass(frozen=True)
class Marker:
    """Says which configuration a folder belongs to; results of another one are never taken for its own."""

    folder: Path
    config: dict[str, Any]
    """Everything that decides the result."""

    @property
    def _begun(self) -> Path:
        return self.folder / "begun.json"

    @property
    def _finished(self) -> Path:
        return self.folder / "finished.json"

    @property
    def has_begun(self) -> bool:
        """Whether a configuration has claimed the folder."""
        return self._begun.exists()

    def digest(self) -> str:
        """Of the configuration."""
        return digest(self.config)

    def check(self) -> None:
        """Does nothing where the folder is new, or belongs to this configuration.

        Raises:
            ConfigurationError: It belongs to another; the message says what is different.
        """
        if not self.has_begun:
            return
        begun = json.loads(self._begun.read_text())
        if begun["digest"] == self.digest():
            return
        before, now = flat(begun["config"]), flat(json.loads(json.dumps(self.config)))
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changes = [f"{key} was {before.get(key)} and is {now.get(key)}" for key in keys[:SHOWN]]
        more = f", and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        raise ConfigurationError(
            f"{self.folder} holds results of another configuration ({'; '.join(changes)}{more}); give another --folder"
        )

    def begin(self, goes_on: bool = False) -> None:
        """Claim the folder for the configuration, anew or to go on with what another attempt has left in it."""
        first = self.begun_with() if goes_on and self.has_begun else code()
        _write(self._begun, {"digest": self.digest(), "code": first, "config": self.config})

    def finish(self, seconds: float, *, continued: bool = False, diverged: str | None = None) -> None:
        """Say that all is there, and how long this attempt took; or that no more will come, and why.

        Args:
            seconds: Of this attempt.
            continued: Whether it went on with what another had left.
            diverged: Why there will never be a result.
        """
        found = {"digest": self.digest(), "code": of_both(self.begun_with(), code())}
        _write(self._finished, found | {"seconds": seconds, "continued": continued, "diverged": diverged})

    def begun_with(self) -> str:
        """Which code claimed the folder."""
        return str(json.loads(self._begun.read_text()).get("code", "unknown"))

    def code(self) -> str:
        """Which code the finished run was made with."""
        return str(json.loads(self._finished.read_text()).get("code", "unknown"))

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` has been called for this configuration."""
        return self._end() is not None

    def seconds(self) -> float | None:
        """How long the whole took; None where it is not finished, or several attempts were needed."""
        found = self._end()
        return None if found is None or found.get("continued") else float(found["seconds"])

    def diverged(self) -> str | None:
        """Why the folder's run ended before its time; None where it did not, is not finished or was of another."""
        found = self._end()
        return None if found is None else found.get("diverged")

    def _end(self) -> dict[str, Any] | None:
        if not self._finished.exists():
            return None
        finished: dict[str, Any] = json.loads(self._finished.read_text())
        return finished if finished["digest"] == self.digest() else None


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
