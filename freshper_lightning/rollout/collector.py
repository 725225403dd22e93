"""Plays environments with an engine and returns what happened as trajectories."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from freshper_lightning.envs.protocol import TextEnv, make_text_env
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.episode import MIN_ROOM, Episode, EpisodeError, EpisodePlan, Opening, Outcome, reset
from freshper_lightning.rollout.sampling import SamplingConfig
from freshper_lightning.trajectory import ClockReading, Trajectory

log = logging.getLogger(__name__)

Play = Literal["lock_step", "streaming"]
THREADS: dict[Play, int] = {"lock_step": 1, "streaming": 32}
"""Environments that may be busy at the same time, by default."""

T = TypeVar("T")


class TooManyFailuresError(RuntimeError):
    """Environments lost more episodes than they may; the first failure is the cause."""


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
    """Plays episodes with one engine, in lock-step or streaming.

    In lock-step every running episode is given a reply and then every environment makes a step, so that equal weights
    and plans give equal episodes, as long as environments that are busy at the same time share no state. Streaming, an
    environment that is ready is given its next reply at once while others are still busy; which requests share a batch
    then depends on time, and with them the rounding of log-probabilities and now and then a token.

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
        play: ``lock_step`` or ``streaming``.
        threads: How many environments may be busy at the same time; by default 1 in lock-step, in the calling thread,
            and 32 streaming.

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
        play: Play = "lock_step",
        threads: int | None = None,
    ) -> None:
        if play not in get_args(Play):
            raise ValueError(f"play must be one of {', '.join(get_args(Play))}, not {play!r}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if not format_penalty <= 0:
            raise ValueError(f"format_penalty must be at most 0, not {format_penalty}")
        if not 0 <= max_failure_share <= 1:
            raise ValueError(f"max_failure_share must be in [0, 1], not {max_failure_share}")
        if max_context <= MIN_ROOM:
            raise ValueError(f"max_context must be above {MIN_ROOM}, not {max_context}")
        self.engine, self.chat, self.environment, self.sampling = engine, chat, environment, sampling
        self.format_penalty, self.max_failure_share, self.max_context = format_penalty, max_failure_share, max_context
        self.play, self.threads = play, threads or THREADS[play]
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
            TooManyFailuresError: More than ``max_failure_share`` of the episodes failed.
        """
        temperature = self.sampling.temperature if temperature is None else temperature
        run = Run(self, plans, temperature, progress or (lambda ended: None))
        if self.play == "streaming":
            from freshper_lightning.rollout.streaming import stream

            stream(run, self.threads)
        else:
            run.in_lock_step(self.threads)
        return run.finished(born)

    def close(self) -> None:
        """Close the environments; the engine is its owner's to close."""
        while self._envs:
            self._envs.popitem()[1].close()

    def _make_env(self) -> TextEnv:
        return make_text_env(self.environment.id, self.environment.kwargs)

    def env(self, slot: int) -> TextEnv:
        """The environment of a slot, made when it is first asked for."""
        if slot not in self._envs:
            self._envs[slot] = self._make_env()
        return self._envs[slot]

    def discard(self, slot: int) -> None:
        """Close and forget an environment that raised: nothing is known about its state."""
        env = self._envs.pop(slot)
        try:
            env.close()
        except Exception as error:  # the loss of the episode is counted already, and this one is part of it
            log.warning("an environment that raised could not be closed: %s: %s", type(error).__name__, error)


class Run:
    """The state of one :meth:`Collector.collect`; slots are positions in the plans."""

    def __init__(
        self,
        collector: Collector,
        plans: Sequence[EpisodePlan],
        temperature: float,
        progress: Callable[[int], None],
    ) -> None:
        self.collector = collector
        self.plans = plans
        self.temperature = temperature
        self.collection = Collection()
        self.episodes: dict[int, Episode] = {}
        self._progress, self._reported = progress, 0
        self._lost: set[int] = set()
        self._failed_groups: set[int] = set()
        self._first_error: EpisodeError | None = None

    def in_lock_step(self, threads: int) -> None:
        """Play all episodes to their ends, turn by turn."""
        with _answers(threads) as ask:
            openings = [ask(partial(reset, self.collector.env(slot), plan)) for slot, plan in enumerate(self.plans)]
            for slot, opening in enumerate(openings):
                with self.lost_to_an_error(slot):
                    self.begin(slot, opening())
            while running := [slot for slot in self.episodes if self.runs(slot)]:
                began = time.perf_counter()
                completions = self.collector.engine.generate([self.request(slot) for slot in running])
                self.collection.seconds_generating += time.perf_counter() - began
                replies = [self.take(slot, completion) for slot, completion in zip(running, completions, strict=True)]
                outcomes = [
                    ask(partial(self.episodes[slot].play, reply)) for slot, reply in zip(running, replies, strict=True)
                ]
                for slot, outcome in zip(running, outcomes, strict=True):
                    with self.lost_to_an_error(slot):
                        self.settle(slot, outcome())
                self.report_ended()

    def begin(self, slot: int, opening: Opening) -> None:
        """Open the conversation of an environment that has been reset."""
        chat, max_context = self.collector.chat, self.collector.max_context
        self.episodes[slot] = Episode.start(self.plans[slot], self.collector.env(slot), opening, chat, max_context)

    def runs(self, slot: int) -> bool:
        """Whether the episode goes on; the rest of a failed group does not."""
        episode = self.episodes.get(slot)
        return episode is not None and episode.running and episode.plan.group not in self._failed_groups

    def request(self, slot: int) -> GenerationRequest:
        """What the engine is asked for next."""
        episode = self.episodes[slot]
        return GenerationRequest(
            request_id=slot,
            prompt_token_ids=list(episode.conversation.token_ids),
            max_tokens=min(self.collector.sampling.max_tokens, episode.room),
            temperature=self.temperature,
            seed=episode.seed,
        )

    def take(self, slot: int, completion: Completion) -> str:
        """The reply as text, once it is part of the conversation."""
        self.collection.num_sampled_tokens += len(completion.token_ids)
        return self.episodes[slot].take(completion)

    def settle(self, slot: int, outcome: Outcome) -> None:
        """Count what the environment made of a reply and go on with the conversation."""
        self.episodes[slot].settle(outcome)
        self.collection.num_env_steps += 1
        self.collection.num_valid += outcome.step.valid
        self.collection.num_effective += outcome.step.effective

    def report_ended(self) -> None:
        """Tell how many more episodes have ended or were lost."""
        begun = self.episodes.keys() | self._lost
        ended = sum(not self.runs(slot) for slot in begun)
        if ended > self._reported:
            self._progress(ended - self._reported)
        self._reported = ended

    def finished(self, born: ClockReading) -> Collection:
        """The collection, whole groups only."""
        collector, collection = self.collector, self.collection
        episodes = [self.episodes[slot] for slot in sorted(self.episodes)]
        whole = [episode for episode in episodes if episode.plan.group not in self._failed_groups]
        collection.num_dropped = len(episodes) - len(whole)
        collection.trajectories = [
            episode.trajectory(born, collector.environment.id, collector.format_penalty) for episode in whole
        ]
        collection.scores = [episode.scores for episode in whole]
        collection.transcript = whole[0].conversation.text() if whole else ""
        return collection

    @contextmanager
    def lost_to_an_error(self, slot: int) -> Iterator[None]:
        """Drop the episode, and with it its group, where the body raises an :class:`EpisodeError`.

        Raises:
            TooManyFailuresError: More episodes are lost than may be.
        """
        try:
            yield
        except EpisodeError as error:
            self._lose(slot, error)

    def _lose(self, slot: int, error: EpisodeError) -> None:
        log.error("%s", error, exc_info=error)
        self.collector.discard(slot)
        self.episodes.pop(slot, None)
        self._lost.add(slot)
        self._failed_groups.add(self.plans[slot].group)
        self.collection.failures.append(str(error))
        self._first_error = self._first_error or error
        failures, allowed = len(self.collection.failures), self.collector.max_failure_share
        if failures > allowed * len(self.plans):
            raise TooManyFailuresError(
                f"{failures} of {len(self.plans)} episodes of {self.collector.environment.id} failed, more than "
                f"max_failure_share {allowed} allows; the first: {self._first_error}"
            ) from self._first_error


@contextmanager
def _answers(threads: int) -> Iterator[Callable[[Callable[[], T]], Callable[[], T]]]:
    """How to put work to environments: what comes back gives the result, or raises what the work has raised.

    For one thread the work is done in the calling one, when its result is asked for.
    """
    if threads == 1:
        yield lambda work: work
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="environment") as pool:
        try:
            yield lambda work: pool.submit(work).result
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
