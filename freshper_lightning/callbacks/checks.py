"""What has to agree between the parts of a run, checked before a model is loaded."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning import Trainer
from transformers import AutoConfig, AutoTokenizer

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.algorithm import Reinforce
from freshper_lightning.callbacks.openings import made, refused
from freshper_lightning.callbacks.parts import data_module, replay_data
from freshper_lightning.callbacks.trainer_checks import check_trainer
from freshper_lightning.envs.protocol import takes_argument
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.net import require_model_folder
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
    require_model_folder(module.path)
    check_trainer(trainer)
    _check_order(trainer, rollout)
    _check_optimizer(trainer, module)
    _check_engine(module, rollout)
    _check_temperature(module, rollout)
    _check_critic(module)
    _check_data(trainer, module)
    _check_guard(trainer, module)
    _check_group(module, rollout)
    _check_replay_epoch(trainer, module, rollout)
    _check_ranks(trainer, rollout)
    chat_format(module, rollout)
    _instances("rollout.environment", rollout.environment)


def check_held_out(
    training: EnvironmentConfig, evaluation: EnvironmentConfig | None, demonstrated: Mapping[str, Any]
) -> None:
    """Refuse an evaluation that would play what is trained on, as far as the environments name their instances.

    Args:
        training: What is played in rollouts.
        evaluation: What is played in evaluations; that of rollouts where there is none.
        demonstrated: Arguments of demonstrations, empty without any; one that the environment of ``training`` takes
            means the same there.

    Raises:
        ConfigurationError: An environment cannot be made, or an instance of evaluation is trained on.
    """
    trained = _instances("rollout.environment", training)
    if evaluation is None:
        if trained:
            raise ConfigurationError(
                f"evaluation.environment=null would evaluate on the {len(trained)} instances of {training.id} that"
                " rollout.environment trains on; it must be an environment with others, such as another file or split"
            )
        return
    evaluated = _instances("evaluation.environment", evaluation)
    if not evaluated:
        return
    shared = {name: value for name, value in demonstrated.items() if takes_argument(training.id, name)}
    shown = EnvironmentConfig(training.id, training.kwargs | shared)
    for key, kwargs, instances in (
        ("rollout.environment", training.kwargs, trained),
        ("data.arguments", shared, _instances("data.arguments", shown) if shared else frozenset()),
    ):
        if common := evaluated & instances:
            raise ConfigurationError(
                f"evaluation.environment={evaluation.kwargs} shares {len(common)} instances with {key}={kwargs},"
                f" such as {min(common)[:80]!r}; what is trained on must be held out from evaluation"
            )


def _instances(key: str, environment: EnvironmentConfig) -> frozenset[str]:
    """What the environment draws from, where it says so."""
    with made(key, environment) as env:
        try:
            instances: frozenset[str] = getattr(env.unwrapped, "instances", frozenset())
            return instances
        except Exception as error:
            raise refused(key, error) from error


def check_checkpoint(trainer: Trainer, path: object, fitting: bool) -> None:
    """Refuse to load the checkpoint at ``path`` where that would not give what it was saved from.

    Raises:
        ConfigurationError: There are several ranks, or training would go on by a number of steps.
    """
    ranks = max(trainer.world_size, trainer.num_devices * trainer.num_nodes)
    if ranks > 1:
        raise ConfigurationError(
            f"ckpt_path={path!r} must be loaded on one rank, not on trainer.devices x trainer.num_nodes = {ranks}: a"
            " checkpoint holds the replay buffer of the first rank only"
        )
    if fitting and trainer.max_steps != -1:
        raise ConfigurationError(
            f"trainer.max_steps={trainer.max_steps} must be -1 where a run is resumed: Lightning would collect an"
            " iteration and train on part of it; trainer.max_epochs is the length in iterations"
        )


def _check_order(trainer: Trainer, rollout: "RolloutCallback") -> None:
    from freshper_lightning.callbacks.evaluation import EvaluationCallback
    from freshper_lightning.callbacks.freshness import FreshnessCallback
    from freshper_lightning.callbacks.replay_monitor import ReplayMonitor

    callbacks: list[object] = getattr(trainer, "callbacks", [])
    kinds = (EvaluationCallback, FreshnessCallback, ReplayMonitor)
    for callback in callbacks[: callbacks.index(rollout)]:
        if isinstance(callback, kinds):
            raise ConfigurationError(
                f"{type(callback).__name__} must come after RolloutCallback among trainer.callbacks: it reads the clock"
                " that RolloutCallback moves"
            )


def _check_engine(module: PolicyModule, rollout: "RolloutCallback") -> None:
    config = rollout.engine_config
    try:
        name, _ = config.resolve()
        limit = getattr(AutoConfig.from_pretrained(module.path).get_text_config(), "max_position_embeddings", None)
    except ValueError as error:
        raise ConfigurationError(f"rollout.engine: {error}") from error
    if name == "vllm" and config.kv_cache_mib == 0:
        raise ConfigurationError("rollout.engine.kv_cache_mib=0 must be positive for the vllm engine")
    if limit is not None and config.max_model_len > limit:
        raise ConfigurationError(
            f"rollout.engine.max_model_len={config.max_model_len} must be at most {limit}, the model's"
            " max_position_embeddings"
        )
    room = module.max_micro_batch_tokens
    if room is not None and config.max_model_len > room:
        raise ConfigurationError(
            f"model.max_micro_batch_tokens={room} must be at least rollout.engine.max_model_len={config.max_model_len},"
            " the tokens that one conversation may have; raise the one or lower the other"
        )


def chat_format(module: PolicyModule, rollout: "RolloutCallback") -> ChatFormat:
    """How the policy's chat template is talked to.

    Raises:
        ConfigurationError: There is no tokenizer or template, or a conversation cannot be built from it.
    """
    try:
        chat = ChatFormat(AutoTokenizer.from_pretrained(module.path), history=rollout.history)
        stops = stop_token_ids(module.path)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"model.path={module.path!r}: {error}") from error
    if chat.end_token_id not in stops:
        raise ConfigurationError(
            f"model.path={module.path!r}: the chat template ends a reply with {chat.end_token!r} ({chat.end_token_id}),"
            f" which is not among the eos_token_id {list(stops)} of the generation config, so that no reply would stop"
        )
    return chat


def _check_temperature(module: PolicyModule, rollout: "RolloutCallback") -> None:
    if module.temperature != rollout.sampling.temperature:
        raise ConfigurationError(
            f"model.temperature={module.temperature} must equal rollout.sampling.temperature="
            f"{rollout.sampling.temperature}: log-probabilities are compared at one temperature"
        )


def _check_critic(module: PolicyModule) -> None:
    name = type(module.algorithm).__name__
    if module.algorithm.needs_critic() and module.critic is None:
        raise ConfigurationError(
            f"model.critic=null, but model.algorithm={name} learns from one; set model.critic={{}}"
        )
    if module.critic is not None and not module.algorithm.needs_critic():
        raise ConfigurationError(
            f"model.critic={module.critic} does not go with model.algorithm={name}, which reads none; allowed: null, or"
            " model.algorithm=PPO"
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
    if priority.needs_critic and not module.algorithm.needs_critic():
        raise ConfigurationError(
            f"data.priority={type(priority).__name__} needs a critic, which model.algorithm={name} does not have;"
            " AbsoluteAdvantage, AbsoluteReward and UniformPriority do without"
        )
    if priority.needs_advantages and module.algorithm.needs_critic():
        raise ConfigurationError(
            f"data.priority={type(priority).__name__} needs advantages that are fixed at collection, which"
            f" model.algorithm={name} does not have; allowed: TDError, AbsoluteReward, UniformPriority and others"
        )


def _check_guard(trainer: Trainer, module: PolicyModule) -> None:
    data = replay_data(trainer)
    if module.guard.enabled and (data is None or data.replay_updates == 0):
        without = "a data module without replay" if data is None else "data.replay_updates=0"
        raise ConfigurationError(
            f"model.guard={module.guard} is for replay updates, of which {without} makes none; leave it out, or set"
            " data.replay_updates to at least 1"
        )


def _check_group(module: PolicyModule, rollout: "RolloutCallback") -> None:
    algorithm = module.algorithm
    if not isinstance(algorithm, Reinforce) or rollout.group_size >= 2:
        return
    if algorithm.baseline != "none":
        raise ConfigurationError(
            f"rollout.group_size={rollout.group_size} must be at least 2 for model.algorithm.baseline="
            f"{algorithm.baseline!r}: the advantage of a group of one is 0"
        )
    if algorithm.group_filter is not None:
        raise ConfigurationError(
            f"rollout.group_size={rollout.group_size} must be at least 2 for model.algorithm.group_filter="
            f"{algorithm.group_filter}: the returns of a group of one do not differ"
        )


def _check_replay_epoch(trainer: Trainer, module: PolicyModule, rollout: "RolloutCallback") -> None:
    data, size = replay_data(trainer), rollout.groups * rollout.group_size
    if data is not None and module.algorithm.needs_proximal() and size == data.batch_size:
        raise ConfigurationError(
            f"model.algorithm.correction='decoupled' needs at least 2 optimizer batches per epoch, but data.batch_size="
            f"{data.batch_size} is all of rollout.groups x rollout.group_size: with one batch the proximal policy is"
            " the current one, and what remains is truncated importance sampling; set it as"
            " model.algorithm.correction=importance_sampling, or make data.batch_size smaller"
        )
    clip = module.algorithm.value_bound()
    if data is not None and clip is not None and size == data.batch_size:
        raise ConfigurationError(
            f"model.algorithm.value_clip={clip} needs at least 2 optimizer batches per epoch, but data.batch_size="
            f"{data.batch_size} is all of rollout.groups x rollout.group_size: values cannot have moved since the epoch"
            " began; allowed: null, or a smaller data.batch_size"
        )


def _check_optimizer(trainer: Trainer, module: PolicyModule) -> None:
    optimizer = module.check_optimizer()
    kind = type(optimizer)
    if trainer.world_size > 1 and kind.__module__.startswith("bitsandbytes."):
        raise ConfigurationError(
            f"model.optimizer={kind.__name__} of bitsandbytes does not know sharded weights and must run on one rank,"
            f" not {trainer.world_size}; torch.optim.AdamW keeps its state sharded"
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
