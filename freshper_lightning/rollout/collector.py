"""Plays environments with an engine and returns what happened as trajectories."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from freshper_lightning.envs.protocol import TextEnv, make_text_env
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.episode import MIN_ROOM, Episode, EpisodeError, EpisodePlan
from freshper_lightning.rollout.sampling import SamplingConfig
from freshper_lightning.trajectory import ClockReading, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvironmentConfig:
    """Which environment is played."""

    id: str = "freshper/FrozenLake-v0"
    """Id of a registered gymnasium environment that speaks text; ``module:Name-v0`` imports the module first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""


@dataclass(slots=True)
class Collection:
    """What one collection brought; every group is either whole or missing.

    Counts cover everything that was played, episodes of dropped groups included.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    """Finished episodes in the order of their plans."""
    scores: list[dict[str, float]] = field(default_factory=list)
    """What the environments measured in these episodes beside the reward, in the same order."""
    failures: list[str] = field(default_factory=list)
    """One line for each episode that its environment lost."""
    num_dropped: int = 0
    """Episodes that did not fail but were dropped because a member of their group did."""
    num_sampled_tokens: int = 0
    """Tokens that the engine sampled."""
    num_env_steps: int = 0
    """Replies that an environment played."""
    num_valid: int = 0
    """Environment steps whose reply could be parsed."""
    num_effective: int = 0
    """Environment steps that changed the state."""
    seconds_generating: float = 0.0
    """Wall-clock time inside the engine."""
    transcript: str = ""
    """The first trajectory as text, special tokens included."""


class Collector:
    """Plays episodes in lock-step: one reply of every running episode, then one step of every environment.

    Every plan gives exactly one :class:`Trajectory`, unless the environment fails for it or for another member of its
    group: statistics of a group need all of its members. An episode ends when its environment says so, or as truncated
    when fewer than two tokens of ``max_context`` are left.

    Args:
        engine: Samples the replies.
        chat: Turns messages into tokens.
        environment: What is played; environments are made once and reused.
        sampling: Temperature, and bound on the tokens of one reply.
        format_penalty: At most 0; added to a trajectory's ``format_penalty``, never to its rewards, per invalid reply.
        max_context: Bound on the tokens of a conversation.
        max_failure_share: Largest share of the planned episodes that an environment may lose by raising.

    Raises:
        ValueError: An argument is out of range, or the environment cannot be made or does not speak text.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        chat: ChatFormat,
        environment: EnvironmentConfig,
        sampling: SamplingConfig,
        format_penalty: float,
        max_context: int,
        max_failure_share: float = 0.1,
    ) -> None:
        if not format_penalty <= 0:
            raise ValueError(f"format_penalty must be at most 0, not {format_penalty}")
        if not 0 <= max_failure_share <= 1:
            raise ValueError(f"max_failure_share must be in [0, 1], not {max_failure_share}")
        if max_context <= MIN_ROOM:
            raise ValueError(f"max_context must be above {MIN_ROOM}, not {max_context}")
        self.engine, self.chat, self.environment, self.sampling = engine, chat, environment, sampling
        self.format_penalty, self.max_failure_share, self.max_context = format_penalty, max_failure_share, max_context
        self._envs: dict[int, TextEnv] = {0: self._make_env()}

    def collect(
        self,
        plans: Sequence[EpisodePlan],
        born: ClockReading,
        temperature: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Collection:
        """Play ``plans`` to their ends.

        Args:
            plans: The episodes; (group, member) must be distinct.
            born: The clock, copied into the trajectories.
            temperature: Instead of the configured one; 0 is greedy.
            progress: Told how many more episodes have ended, each time that some have.

        Raises:
            RuntimeError: More than ``max_failure_share`` of the episodes failed; the first failure is the cause.
        """
        run = _Run(self, len(plans), self.sampling.temperature if temperature is None else temperature)
        run.start(plans)
        ended = 0
        while running := run.running():
            run.turn(running)
            now = len(plans) - len(run.running())
            if progress is not None and now > ended:
                progress(now - ended)
            ended = now
        return run.finished(born)

    def close(self) -> None:
        """Close the environments; the engine is its owner's to close."""
        while self._envs:
            self._envs.popitem()[1].close()

    def _make_env(self) -> TextEnv:
        return make_text_env(self.environment.id, self.environment.kwargs)

    def _env(self, slot: int) -> TextEnv:
        if slot not in self._envs:
            self._envs[slot] = self._make_env()
        return self._envs[slot]

    def _discard(self, slot: int) -> None:
        """Forget an environment that raised: nothing is known about its state."""
        del self._envs[slot]


class _Run:
    """The state of one :meth:`Collector.collect`; slots are positions in the plans."""

    def __init__(self, collector: Collector, num_plans: int, temperature: float) -> None:
        self.collector = collector
        self.num_plans = num_plans
        self.temperature = temperature
        self.collection = Collection()
        self.episodes: dict[int, Episode] = {}
        self.failed_groups: set[int] = set()
        self.first_error: EpisodeError | None = None

    def start(self, plans: Sequence[EpisodePlan]) -> None:
        collector = self.collector
        for slot, plan in enumerate(plans):
            try:
                env = collector._env(slot)
                self.episodes[slot] = Episode.start(plan, env, collector.chat, collector.max_context)
            except EpisodeError as error:
                self._fail(slot, plan, error)

    def running(self) -> list[int]:
        """Slots of the episodes that go on; the rest of a failed group does not."""
        return [
            slot
            for slot, episode in self.episodes.items()
            if episode.running and episode.plan.group not in self.failed_groups
        ]

    def turn(self, slots: Sequence[int]) -> None:
        """One reply for every slot, then one step of every environment."""
        began = time.perf_counter()
        completions = self.collector.engine.generate([self._request(slot) for slot in slots])
        self.collection.seconds_generating += time.perf_counter() - began
        for slot, completion in zip(slots, completions, strict=True):
            self._advance(slot, completion)

    def finished(self, born: ClockReading) -> Collection:
        collector, collection = self.collector, self.collection
        whole = [episode for episode in self.episodes.values() if episode.plan.group not in self.failed_groups]
        collection.num_dropped = len(self.episodes) - len(whole)
        collection.trajectories = [
            episode.trajectory(born, collector.environment.id, collector.format_penalty) for episode in whole
        ]
        collection.scores = [episode.scores for episode in whole]
        collection.transcript = whole[0].conversation.text() if whole else ""
        return collection

    def _request(self, slot: int) -> GenerationRequest:
        episode = self.episodes[slot]
        return GenerationRequest(
            request_id=slot,
            prompt_token_ids=list(episode.conversation.token_ids),
            max_tokens=min(self.collector.sampling.max_tokens, episode.room),
            temperature=self.temperature,
            seed=episode.seed,
        )

    def _advance(self, slot: int, completion: Completion) -> None:
        collection, episode = self.collection, self.episodes[slot]
        collection.num_sampled_tokens += len(completion.token_ids)
        try:
            step = episode.advance(completion)
        except EpisodeError as error:
            del self.episodes[slot]
            self._fail(slot, episode.plan, error)
            return
        collection.num_env_steps += 1
        collection.num_valid += step.valid
        collection.num_effective += step.effective

    def _fail(self, slot: int, plan: EpisodePlan, error: EpisodeError) -> None:
        log.error("%s", error, exc_info=error)
        self.collector._discard(slot)
        self.failed_groups.add(plan.group)
        self.collection.failures.append(str(error))
        self.first_error = self.first_error or error
        failures, allowed = len(self.collection.failures), self.collector.max_failure_share
        if failures > allowed * self.num_plans:
            raise RuntimeError(
                f"{failures} of {self.num_plans} episodes of {self.collector.environment.id} failed, more than "
                f"max_failure_share {allowed} allows; the first: {self.first_error}"
            ) from self.first_error
