"""Whether episodes of an environment can begin, tried before a model is loaded."""

from collections.abc import Sequence

from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat, ChatTemplateError
from freshper_lightning.rollout.episode import MIN_ROOM, Episode, EpisodeError, EpisodePlan, NoRoomError, reset
from freshper_lightning.rollout.host import host_state_kept

TRIED = 8
"""Instances of an environment that are tried at most; one whose episode begins is enough."""


def check_openings(
    key: str, environment: EnvironmentConfig, seeds: Sequence[int], chat: ChatFormat, max_context: int
) -> None:
    """Make the environment that stands under ``key`` and begin an episode of one of its instances.

    Whatever it raises is the user's to mend. Where some instances raise, or leave no room for a reply in
    ``max_context`` tokens, and others do not, the run decides by how many it loses. Random states are kept.

    Args:
        key: Names the environment in errors.
        environment: What is to be played.
        seeds: Instances, the first :data:`TRIED` of which count.
        chat: Format of the first prompt.
        max_context: Bound on the tokens of a conversation.

    Raises:
        ConfigurationError: The environment cannot be made, does not speak text, or none of the instances begins.
    """
    failures: list[EpisodeError] = []
    with host_state_kept():
        try:
            env = make_text_env(environment.id, environment.kwargs)
        except Exception as error:
            raise refused(key, error) from error
        for number, seed in enumerate(seeds[:TRIED]):
            plan = EpisodePlan(group=number, member=0, instance_seed=seed, sampling_key=(seed,))
            try:
                Episode.start(plan, env, reset(env, plan), chat, max_context)
                failures.clear()
                break
            except ChatTemplateError as error:
                raise ConfigurationError(f"model.path: {error}, with which {key}={environment.id} begins") from error
            except EpisodeError as error:
                failures.append(error)
        env.close()
    if failures:
        raise _none_begins(key, environment, failures, max_context)


def refused(key: str, error: Exception) -> ConfigurationError:
    """What the constructor of the environment under ``key`` raised, as an error of the configuration."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return ConfigurationError(f"{key}: {kind}{error}")


def _none_begins(
    key: str, environment: EnvironmentConfig, failures: Sequence[EpisodeError], max_context: int
) -> ConfigurationError:
    lengths = [error.tokens for error in failures if isinstance(error, NoRoomError)]
    if not lengths:
        return ConfigurationError(
            f"{key}={environment.id}: none of {len(failures)} instances can be played; the first: {failures[0]}"
        )
    return ConfigurationError(
        f"rollout.engine.max_model_len={max_context} must be at least {min(lengths) + MIN_ROOM}: that many tokens take"
        f" the shortest first prompt that was found for {key}={environment.id} and a reply of {MIN_ROOM}"
    )
