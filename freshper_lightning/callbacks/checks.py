"""What has to agree between the parts of a run, checked before a model is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning import Trainer
from transformers import AutoTokenizer

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.algorithm import Reinforce
from freshper_lightning.callbacks.parts import data_module, replay_data
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.rollout.checkpoint import stop_token_ids
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat

if TYPE_CHECKING:
    from freshper_lightning.callbacks.rollout import RolloutCallback


def check_configuration(trainer: Trainer, module: PolicyModule, rollout: "RolloutCallback") -> None:
    """Refuse a combination of settings that cannot work or would not mean what it says.

    Raises:
        ConfigurationError: Names the key, its value and what is allowed.
    """
    _check_model(module)
    _check_temperature(module, rollout)
    _check_data(trainer, module)
    _check_group(module, rollout)
    _check_ranks(trainer, rollout)
    _check_tokenizer(module, rollout)
    check_environment("rollout.environment", rollout.environment)


def check_environment(key: str, environment: EnvironmentConfig) -> None:
    """Make the environment that stands under ``key`` once, so that one that cannot be made is refused in time.

    Raises:
        ConfigurationError: It cannot be made, or does not speak text.
    """
    try:
        make_text_env(environment.id, environment.kwargs).close()
    except ValueError as error:
        raise ConfigurationError(f"{key}: {error}") from error


def _check_model(module: PolicyModule) -> None:
    if not (Path(module.path) / "config.json").is_file():
        raise ConfigurationError(
            f"model.path={module.path!r} is not the folder of a Hugging Face model: no config.json in it"
        )


def _check_tokenizer(module: PolicyModule, rollout: "RolloutCallback") -> None:
    try:
        chat = ChatFormat(AutoTokenizer.from_pretrained(module.path), history=rollout.history)
        stops = stop_token_ids(module.path)
    except ValueError as error:
        raise ConfigurationError(f"model.path={module.path!r}: {error}") from error
    if chat.end_token_id not in stops:
        raise ConfigurationError(
            f"model.path={module.path!r}: the chat template ends a reply with {chat.end_token!r} ({chat.end_token_id}),"
            f" which is not among the eos_token_id {list(stops)} of the generation config, so that no reply would stop"
        )


def _check_temperature(module: PolicyModule, rollout: "RolloutCallback") -> None:
    if module.temperature != rollout.sampling.temperature:
        raise ConfigurationError(
            f"model.temperature={module.temperature} must equal rollout.sampling.temperature="
            f"{rollout.sampling.temperature}: log-probabilities are compared at one temperature"
        )


def _check_data(trainer: Trainer, module: PolicyModule) -> None:
    data, name = data_module(trainer), type(module.algorithm).__name__
    if data is None:
        return
    if isinstance(data, ReplayDataModule) != module.algorithm.needs_rollouts:
        allowed = "ReplayDataModule" if module.algorithm.needs_rollouts else "a data module of demonstrations"
        raise ConfigurationError(
            f"data={type(data).__name__} does not go with model.algorithm={name}, which needs {allowed}"
        )
    if not isinstance(data, ReplayDataModule):
        return
    priority = data.buffer.priority
    if priority.needs_critic and not module.algorithm.needs_critic:
        raise ConfigurationError(
            f"data.priority={type(priority).__name__} needs a critic, which model.algorithm={name} does not have;"
            " AbsoluteAdvantage, AbsoluteReward and UniformPriority do without"
        )


def _check_group(module: PolicyModule, rollout: "RolloutCallback") -> None:
    algorithm = module.algorithm
    if isinstance(algorithm, Reinforce) and algorithm.baseline != "none" and rollout.group_size < 2:
        raise ConfigurationError(
            f"rollout.group_size={rollout.group_size} must be at least 2 for model.algorithm.baseline="
            f"{algorithm.baseline!r}: the advantage of a group of one is 0"
        )


def _check_ranks(trainer: Trainer, rollout: "RolloutCallback") -> None:
    world_size = trainer.world_size
    if rollout.groups % world_size:
        raise ConfigurationError(
            f"rollout.groups={rollout.groups} must be a multiple of the number of ranks, {world_size}"
        )
    data = replay_data(trainer)
    if data is not None and data.batch_size % world_size:
        raise ConfigurationError(
            f"data.batch_size={data.batch_size} must be a multiple of the number of ranks, {world_size}"
        )
