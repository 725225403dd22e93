"""What a run left behind: its buffer as it was at a checkpoint, and the settings that it can be read with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning import LightningDataModule
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from datamodules.replay import ReplayDataModule
from freshper_lightning.callbacks.rollout import RolloutCallback, clock_of
from freshper_lightning.checkpoint import DATA_KEY, ReplayCheckpointIO
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.net import require_model_folder
from freshper_lightning.replay import ExponentialDecay, ReplayBuffer
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat, History
from freshper_lightning.saved_config import CONFIG
from freshper_lightning.trajectory import ClockReading


@dataclass(frozen=True, slots=True, eq=False)
class SavedRun:
    """A buffer with the run's own parameters and content, at the moment of the checkpoint; no model is loaded."""

    buffer: ReplayBuffer
    now: ClockReading
    environment: EnvironmentConfig
    history: History
    model: str
    """Folder of the model that the run started from."""

    @classmethod
    def read(cls, checkpoint: str, config: str | None = None) -> "SavedRun":
        """Read a checkpoint and the configuration of its run, by default the one that the run saved with its logs.

        Raises:
            ConfigurationError: One of the two is missing or damaged, they do not fit together, or the run has no
                buffer.
        """
        if not Path(checkpoint).is_file():
            raise ConfigurationError(f"checkpoint={checkpoint!r} is not a file")
        path = _config_of(Path(checkpoint)) if config is None else Path(config)
        settings = _settings(path)
        content = ReplayCheckpointIO().load_checkpoint(checkpoint, map_location="meta")
        state, rollout = content.get(DATA_KEY) or {}, content.get("callbacks", {}).get(RolloutCallback.__qualname__)
        if "buffer" not in state or rollout is None:
            raise ConfigurationError(f"checkpoint={checkpoint!r} has no replay buffer: its run does not replay")
        buffer = settings.data.buffer
        try:
            if state["tau"] is not None:  # it may have moved
                buffer.decay = ExponentialDecay(state["tau"])
            buffer.load_state_dict(state["buffer"])
        except ValueError as error:
            raise ConfigurationError(f"checkpoint={checkpoint!r} does not fit config={str(path)!r}: {error}") from error
        _require_task(buffer, settings.environment, path)
        return cls(buffer, clock_of(rollout), settings.environment, settings.history, settings.model)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model.

        Raises:
            ConfigurationError: The model's folder is gone.
        """
        require_model_folder(self.model)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.model)
        return tokenizer

    def chat(self) -> ChatFormat:
        """How the run built its conversations."""
        return ChatFormat(self.tokenizer(), history=self.history)


@dataclass(frozen=True, slots=True, eq=False)
class _Settings:
    data: ReplayDataModule
    environment: EnvironmentConfig
    history: History
    model: str


def _require_task(buffer: ReplayBuffer, environment: EnvironmentConfig, config: Path) -> None:
    """Compares the newest episode alone: a run that was resumed may have begun with another environment."""
    for trajectory in buffer.get(buffer.ids()[-1:]):
        if trajectory.task != environment.id:
            raise ConfigurationError(
                f"config={str(config)!r} is of another run: its rollout.environment.id={environment.id!r} must be"
                f" {trajectory.task!r}, in which the episodes were played"
            )


def _config_of(checkpoint: Path) -> Path:
    folders = checkpoint.parent.parent, checkpoint.parent
    for folder in folders:
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise ConfigurationError(
        f"config must name the {CONFIG} of the run of checkpoint={str(checkpoint)!r}: there is none in "
        + " or ".join(map(str, folders))
    )


def _settings(path: Path) -> _Settings:
    """Those parts of a run's configuration that say how its buffer is read.

    Raises:
        ConfigurationError: There is no such file, it is not the configuration of a run, or the run does not replay.
    """
    if not path.is_file():
        raise ConfigurationError(f"config={str(path)!r} is not a file")
    try:
        found = yaml.safe_load(path.read_text())
        parts = {
            "data": found["data"],
            "environment": found["rollout"]["environment"],
            "history": found["rollout"]["history"],
            "model": found["model"]["path"],
        }
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"config={str(path)!r} is not a configuration that a run has saved: {error}"
        ) from error
    return _instantiated(path, parts)


def _instantiated(path: Path, parts: dict[str, Any]) -> _Settings:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.add_argument("--environment", type=EnvironmentConfig)
    parser.add_argument("--history", type=History)
    parser.add_argument("--model", type=str)
    try:
        made = parser.instantiate(parser.parse_object(parts))
    except (jsonargparse.ArgumentError, ValueError) as error:
        raise ConfigurationError(f"config={str(path)!r} cannot be used: {error}") from error
    if not isinstance(made.data, ReplayDataModule):
        raise ConfigurationError(f"config={str(path)!r} has no replay buffer: data is a {type(made.data).__name__}")
    return _Settings(made.data, made.environment, made.history, made.model)
