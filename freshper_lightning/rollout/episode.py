"""One episode: an environment and a conversation that take turns."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy as np
import torch

from freshper_lightning.envs.protocol import TextEnv
from freshper_lightning.rollout.conversation import ChatFormat, Conversation
from freshper_lightning.rollout.engine import Completion
from freshper_lightning.rollout.seeds import sampling_seed
from freshper_lightning.trajectory import ClockReading, Trajectory

MIN_ROOM = 2
"""Fewest tokens that a reply may be given: one of text and the end token."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode to play; equal plans, weights and batches give equal episodes."""

    group: int
    """Group of the episode; its members should share ``instance_seed``."""
    member: int
    """Position inside the group."""
    instance_seed: int
    """Seed of the environment's instance."""
    sampling_key: tuple[int, ...]
    """Identifies the episode for sampling: (run seed, iteration, group, member)."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment says when an episode begins."""

    user: str
    """First user message."""
    system: str | None
    """System prompt, where there is one."""


class EpisodeError(RuntimeError):
    """The environment lost this episode; its exception is the cause."""


class NoRoomError(EpisodeError):
    """A first prompt of ``tokens`` tokens leaves no room for a reply."""

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What one reply did, with the defaults of an environment that says nothing about it."""

    reward: float
    valid: bool
    effective: bool

    @classmethod
    def read(cls, reward: SupportsFloat, info: Mapping[str, Any]) -> "Step":
        """From what ``step`` of the environment returned.

        Raises:
            ValueError: The reward is not finite in float32.
        """
        if not abs(float(reward)) <= float(np.finfo(np.float32).max):
            raise ValueError(f"the environment's reward must be finite, not {reward}")
        valid = bool(info.get("valid", True))
        return cls(float(reward), valid, bool(info.get("effective", valid)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment made of one reply."""

    user: str
    """Next user message."""
    step: Step
    terminated: bool
    truncated: bool
    success: bool | None
    """The verdict, where the environment gives one."""
    scores: dict[str, float]
    """What else it measured, by name."""


def reset(env: TextEnv, plan: EpisodePlan) -> Opening:
    """Set the environment to the plan's instance; may run in a thread of its own.

    Raises:
        EpisodeError: The environment raised.
    """
    with _played(plan):
        observation, info = env.reset(seed=plan.instance_seed)
        return Opening(_text(observation), info.get("system"))


@dataclass(slots=True)
class Episode:
    """A conversation and its environment, advanced by one reply at a time while ``running``.

    A turn is :meth:`take`, :meth:`play` and :meth:`settle`, of which only the second waits for the environment and may
    run in a thread of its own.

    Tokens, log-probabilities and weight versions are those of the completions, unchanged. The conversation never
    grows beyond ``max_context`` tokens, and a running one has room for at least two more. What the environment raises,
    and nothing else, becomes an :class:`EpisodeError`.
    """

    plan: EpisodePlan
    env: TextEnv
    conversation: Conversation
    max_context: int
    steps: list[Step] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    success: bool | None = None
    scores: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    running: bool = True

    @classmethod
    def start(cls, plan: EpisodePlan, env: TextEnv, opening: Opening, chat: ChatFormat, max_context: int) -> "Episode":
        """Open the conversation with what :func:`reset` returned.

        Raises:
            NoRoomError: The first prompt leaves no room for a reply.
        """
        conversation = Conversation(chat, opening.user, opening.system)
        episode = cls(plan, env, conversation, max_context)
        if episode.room < MIN_ROOM:
            length = len(conversation.token_ids)
            message = f"{_name(plan)}: a first prompt of {length} tokens leaves no room in {max_context}"
            raise NoRoomError(message, length)
        return episode

    @property
    def room(self) -> int:
        """Tokens that the context still has room for."""
        return self.max_context - len(self.conversation.token_ids)

    @property
    def seed(self) -> int:
        """Sampling seed of the next reply."""
        return sampling_seed(self.plan.sampling_key, len(self.steps))

    def take(self, completion: Completion) -> str:
        """Append the sampled reply and return its text."""
        reply = self.conversation.add_reply(completion.token_ids)
        self.log_probs.extend(completion.log_probs)
        self.weight_versions.append(completion.weight_version)
        return reply

    def play(self, reply: str) -> Outcome:
        """One step of the environment; touches nothing else.

        Raises:
            EpisodeError: The environment raised.
        """
        with _played(self.plan):
            observation, reward, terminated, truncated, info = self.env.step(reply)
            verdict = info.get("success")
            success = None if verdict is None else bool(verdict)
            step = Step.read(reward, info)
            scores = {str(name): float(score) for name, score in info.get("scores", {}).items()}
            return Outcome(_text(observation), step, bool(terminated), bool(truncated), success, scores)

    def settle(self, outcome: Outcome) -> None:
        """Append the next user message unless the episode is over."""
        self.steps.append(outcome.step)
        self.success = self.success if outcome.success is None else outcome.success
        self.scores.update(outcome.scores)
        self.running = not (outcome.terminated or outcome.truncated)
        self.truncated = outcome.truncated and not outcome.terminated
        if self.running:
            self._continue(outcome.user)

    def _continue(self, user: str) -> None:
        self.conversation.add_user(user)
        if self.room < MIN_ROOM:
            self.running, self.truncated = False, True

    def trajectory(self, born: ClockReading, task: str, format_penalty: float) -> Trajectory:
        """The finished episode, up to the last sampled token; ``format_penalty`` counts once per invalid reply."""
        invalid = sum(not step.valid for step in self.steps)
        turns = self.conversation.turns
        return Trajectory(
            token_ids=torch.tensor(self.conversation.token_ids[: turns[-1][1]], dtype=torch.int32),
            turns=torch.tensor(turns, dtype=torch.int32),
            behavior_log_probs=torch.tensor(self.log_probs, dtype=torch.float32),
            rewards=torch.tensor([step.reward for step in self.steps], dtype=torch.float32),
            weight_versions=torch.tensor(self.weight_versions, dtype=torch.int64),
            born=born,
            group=self.plan.group,
            member=self.plan.member,
            seed=self.plan.instance_seed,
            task=task,
            format_penalty=format_penalty * invalid,
            invalid_turns=invalid,
            success=self.success,
            truncated=self.truncated,
        )


@contextmanager
def _played(plan: EpisodePlan) -> Iterator[None]:
    """Turn what the environment raises into the loss of this episode."""
    try:
        yield
    except Exception as error:
        raise EpisodeError(f"{_name(plan)}: {type(error).__name__}: {error}") from error


def _text(observation: object) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"an observation must be text (str), not {type(observation).__name__}")
    return observation


def _name(plan: EpisodePlan) -> str:
    return f"episode {plan.member} of group {plan.group} (instance seed {plan.instance_seed})"
