"""The one kind of data that flows through the system, from the engine to the gradient.

A :class:`Trajectory` is one finished conversation, exactly as it was sampled. Nothing in it is ever re-tokenised,
filled in when missing, or inferred from a padding id.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClockReading:
    """How far training had come at one moment; every field only ever grows.

    A reading is a value: two readings with equal fields are the same moment.
    """

    updates: int = 0
    """Applied optimizer updates, replay updates included; a skipped update does not count."""
    iteration: int = 0
    """Rollout phases begun so far (what the published code counts age in)."""
    lr_path: float = 0.0
    """Sum over applied updates of the learning rate of each."""
    drift: float = 0.0
    """Sum over applied updates of the drift d of each, in nats per sampled token; moves only where it is measured."""
    drift_length: float = 0.0
    """Sum over applied updates of ``sqrt(2 d)``: the length of the policy's path, whatever the size of its steps."""

    def after_update(self, learning_rate: float, drift: float = 0.0) -> "ClockReading":
        """The reading after one more applied update, whose drift (at least 0) is as measured, or 0 where it is not."""
        return replace(
            self,
            updates=self.updates + 1,
            lr_path=self.lr_path + learning_rate,
            drift=self.drift + drift,
            drift_length=self.drift_length + math.sqrt(2 * drift),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """One conversation and the spans of it that the policy wrote (or shall learn to write).

    Shapes: ``L`` tokens in the conversation, ``T`` turns (replies of the policy), ``S`` tokens over all turns.

    Raises:
        ValueError: The pieces do not fit together; the message names the field.
    """

    token_ids: Tensor
    """int32 [L]: the conversation, prompt and replies, as the engine saw and returned it."""
    turns: Tensor
    """int32 [T, 2]: first and one-past-last position of each turn's tokens, in order, not empty."""

    def __post_init__(self) -> None:
        turns = self.turns
        if turns.ndim != 2 or turns.shape[1] != 2 or turns.shape[0] == 0:
            raise ValueError(f"turns must have shape [T, 2] with T >= 1, not {list(turns.shape)}")
        starts, ends = turns[:, 0], turns[:, 1]
        if bool((starts >= ends).any()) or bool((starts[1:] < ends[:-1]).any()):
            raise ValueError(f"turns must be non-empty, ordered and disjoint spans, not {turns.tolist()}")
        if int(starts[0]) < 1 or int(ends[-1]) > self.token_ids.numel():
            raise ValueError(f"turns must lie in [1, {self.token_ids.numel()}], not {turns.tolist()}")

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.token_ids.numel()

    @property
    def num_turns(self) -> int:
        """T."""
        return self.turns.shape[0]

    @property
    def num_sampled(self) -> int:
        """S."""
        return int(self.turn_lengths.sum())

    @property
    def turn_lengths(self) -> Tensor:
        """int64 [T]: tokens of each turn."""
        return (self.turns[:, 1] - self.turns[:, 0]).long()

    def sampled_positions(self) -> Tensor:
        """int64 [S]: positions in ``token_ids`` of the turns' tokens, in order."""
        return torch.cat([torch.arange(start, end) for start, end in self.turns.tolist()])

    def sampled_mask(self) -> Tensor:
        """bool [L]: true on the turns' tokens only."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        mask[self.sampled_positions()] = True
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory(Transcript):
    """One episode; every sampled token carries the log-probability that it was sampled with.

    ``advantages`` is ``None`` until :meth:`freshper_lightning.algorithms.base.Algorithm.advantages` has run, once,
    on whole groups.
    """

    behavior_log_probs: Tensor
    """float32 [S]: the engine's processed log-probability of each sampled token, in nats."""
    rewards: Tensor
    """float32 [T]: the environment's reward of each turn, without the format penalty."""
    weight_versions: Tensor
    """int64 [T]: applied optimizer updates of the weights that sampled each turn."""
    born: ClockReading
    """The clock when the trajectory was collected."""
    group: int
    """Identifies the group; its members share an instance of the environment."""
    member: int
    """Position inside the group."""
    seed: int
    """Seed of the environment's instance."""
    task: str
    """Id of the environment."""
    format_penalty: float = 0.0
    """Sum over turns, at most 0; part of the training return, never of the score, a priority or an evaluation."""
    invalid_turns: int = 0
    """Turns whose reply the environment could not parse."""
    success: bool | None = None
    """The environment's verdict, where it has one."""
    truncated: bool = False
    """Whether the episode ran out of turns or of room rather than ending by itself."""
    advantages: Tensor | None = None
    """float32 [T]: one advantage per turn, frozen at collection."""
    group_mean: float = float("nan")
    """Mean training return of the group at collection, without any KL penalty."""
    group_std: float = float("nan")
    """Standard deviation (biased) of the group's training returns at collection."""
    images: tuple[bytes, ...] = ()
    """Encoded images in the order of their placeholders."""

    def __post_init__(self) -> None:
        # dataclass(slots=True) builds a new class, for which a bare super() would not work.
        Transcript.__post_init__(self)
        if self.behavior_log_probs.numel() != self.num_sampled:
            count = self.behavior_log_probs.numel()
            raise ValueError(f"behavior_log_probs has {count} values for {self.num_sampled} sampled tokens")
        per_turn = {"rewards": self.rewards, "weight_versions": self.weight_versions, "advantages": self.advantages}
        for name, values in per_turn.items():
            if values is not None and list(values.shape) != [self.num_turns]:
                shape = list(values.shape)
                raise ValueError(f"{name} must have one value for each of {self.num_turns} turns, not {shape}")

    @property
    def episode_return(self) -> float:
        """Sum of the environment's rewards: the score."""
        return float(self.rewards.double().sum())

    @property
    def training_return(self) -> float:
        """Score plus format penalty: what advantages are computed from."""
        return self.episode_return + self.format_penalty

    def token_advantages(self) -> Tensor:
        """float32 [S]: the advantage of the turn that each sampled token belongs to.

        Raises:
            ValueError: Advantages have not been computed.
        """
        if self.advantages is None:
            raise ValueError(f"trajectory {self.member} of group {self.group} has no advantages yet")
        return self.advantages.repeat_interleave(self.turn_lengths)

    def token_rewards(self) -> Tensor:
        """float32 [S]: each turn's reward at its last token, the format penalty at the episode's last token, else 0.

        They sum to ``training_return``. The penalty is one number for the episode, so that it cannot be given to turns.
        """
        rewards = torch.zeros(self.num_sampled)
        rewards[self.turn_lengths.cumsum(0) - 1] = self.rewards
        rewards[-1] += self.format_penalty
        return rewards

    def with_advantages(self, advantages: Tensor, group_mean: float, group_std: float) -> "Trajectory":
        """This trajectory with its advantages [T] and the statistics of its group."""
        return replace(self, advantages=advantages.float(), group_mean=group_mean, group_std=group_std)
