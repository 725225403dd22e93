"""Conversations packed into rows without padding between them, and what a loss needs to know about their tokens."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from heapq import heapreplace
from typing import Any, Literal

import torch
from torch import Tensor

from freshper_lightning.trajectory import Trajectory, Transcript

Phase = Literal["fresh", "replay", "demonstration"]

ATTENTION_TOKENS = 1000
"""Width of rows at which attention takes about as long as the rest of the model.

Measured on a CPU: 560 for a hidden size of 128 and 2,100 for one of 576.
"""


@dataclass(slots=True)
class TrajectoryBatch:
    """One micro-batch: ``B`` conversations in ``R`` rows of ``W`` tokens, with ``S`` tokens to train on.

    Everything per token is flat over the ``S`` tokens, conversation after conversation in the order of ``ids``, so
    that nothing downstream depends on how the rows were packed. ``totals`` describe the whole optimizer batch, over
    all micro-batches and ranks.
    """

    input_ids: Tensor
    """int64 [R, W]."""
    position_ids: Tensor
    """int64 [R, W]: restart at 0 with each conversation, which is how the model tells them apart."""
    predicted_from: Tensor
    """int64 [S]: flat position in the rows whose output predicts the token."""
    targets: Tensor
    """int64 [S]: the tokens."""
    segments: Tensor
    """int64 [S]: which of the B conversations the token belongs to."""
    lengths: Tensor
    """int64 [B]: trained tokens of each conversation."""
    behavior_log_probs: Tensor | None
    """float32 [S], or None for demonstrations."""
    advantages: Tensor | None
    """float32 [S], or None for demonstrations, and where a critic has not estimated them yet."""
    importance_weights: Tensor
    """float32 [B]."""
    ids: Tensor
    """int64 [B]: ids in the replay buffer; -1 where there is none."""
    ages: Tensor
    """float64 [B]: age when the batch is handed out, in units of the buffer's clock."""
    phase: Phase = "fresh"
    total_tokens: float = 0.0
    """Trained tokens of the optimizer batch; 0 in an update that is skipped."""
    total_sequences: float = 0.0
    """Conversations of the optimizer batch; 0 in an update that is skipped."""
    proximal_log_probs: Tensor | None = None
    """float32 [S]: the trainer before the first update of the epoch; None until the epoch is prepared, if it is."""
    rewards: Tensor | None = None
    """float32 [S]: rewards of trajectories that have no advantages of their own."""
    values: Tensor | None = None
    """float32 [S]: of the critic that ``advantages``, ``returns`` and ``td_errors`` were computed with."""
    returns: Tensor | None = None
    """float32 [S]: what the values should be."""
    td_errors: Tensor | None = None
    """float32 [S]."""
    reference_log_probs: Tensor | None = None
    """float32 [S]: the frozen reference, where the preparation needed it."""
    ends_iteration: bool = False
    """Whether this is the last micro-batch of the iteration."""

    @property
    def skip(self) -> bool:
        """Whether the update must leave parameters and optimizer state as they are."""
        return self.total_sequences == 0

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch holds no conversation and only keeps ranks and accumulation in step."""
        return self.ids.numel() == 0

    def token_advantages(self) -> Tensor:
        """float32 [S]: the advantages, 1 for demonstrations.

        Raises:
            ValueError: The trajectories have none.
        """
        if self.advantages is None and self.phase != "demonstration":
            raise ValueError(f"a {self.phase} batch has no advantages: its trajectories carry none, and no critic ran")
        if self.advantages is not None:
            return self.advantages
        return torch.ones(self.targets.shape, device=self.targets.device)

    def to(self, device: torch.device | str, **kwargs: Any) -> "TrajectoryBatch":
        """The batch with its tensors on ``device``."""
        moved = copy(self)
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            setattr(moved, name, value.to(device, **kwargs) if isinstance(value, Tensor) else value)
        return moved


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of the conversations in each of exactly ``parts`` groups of about as many tokens, each in order.

    The longest that is left goes to the group with the fewest tokens, the first of equals, so that no group has more
    than 4/3 of the tokens that the best partition's largest has (Graham 1969). Groups stay empty where there are
    fewer conversations than groups.
    """
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, group) for group in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, group = loads[0]
        groups[group].append(index)
        heapreplace(loads, (load + lengths[index], group))
    return [sorted(group) for group in groups]


def pack_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: indices of the conversations in each row of ``width`` tokens.

    Raises:
        ValueError: A conversation is longer than a row.
    """
    if lengths and max(lengths) > width:
        raise ValueError(f"a conversation of {max(lengths)} tokens does not fit in a row of {width}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def cheapest_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the conversations in each row, for rows that take the model the least time.

    With R rows of W tokens that is about R W (1 + W / ATTENTION_TOKENS): narrow rows save attention, which looks at a
    whole row for each token, and wide ones leave less room over. Rows are at least as wide as the longest conversation.
    """
    longest, total = max(lengths), sum(lengths)
    best = pack_rows(lengths, longest)
    least = _cost(len(best), _width(lengths, best))
    for count in range(len(best) - 1, 0, -1):
        width = max(longest, -(-total // count))
        if _cost(count, width) >= least:  # and so it is for fewer rows
            break
        rows = pack_rows(lengths, width)
        cost = _cost(len(rows), _width(lengths, rows))
        if cost < least:
            best, least = rows, cost
    return best


def _cost(rows: int, width: int) -> int:
    return rows * width * (ATTENTION_TOKENS + width)


def _width(lengths: Sequence[int], rows: list[list[int]]) -> int:
    return max(sum(lengths[index] for index in row) for row in rows)


def collate(
    items: Sequence[Transcript],
    *,
    phase: Phase,
    importance_weights: Tensor | None = None,
    ids: Tensor | None = None,
    ages: Tensor | None = None,
) -> TrajectoryBatch:
    """Pack conversations into rows; an empty list gives a filler of zero weight.

    The filler runs the model on one dummy token, so that forward and backward happen on every rank.
    """
    if not items:
        return _filler(phase)
    sizes = [item.num_tokens for item in items]
    rows = cheapest_rows(sizes)
    width = _width(sizes, rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    # Left-over room is one more segment that starts at position 0, so that no conversation attends to it.
    position_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    offsets = [0] * len(items)
    for r, members in enumerate(rows):
        start = 0
        for index in members:
            length = items[index].num_tokens
            input_ids[r, start : start + length] = items[index].token_ids
            position_ids[r, start : start + length] = torch.arange(length)
            offsets[index] = r * width + start
            start += length
        position_ids[r, start:] = torch.arange(width - start)
    lengths = torch.tensor([item.num_sampled for item in items])
    played = [item for item in items if isinstance(item, Trajectory)]
    rewarded = all(item.advantages is None for item in played)
    positions = [item.sampled_positions() for item in items]
    return TrajectoryBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        predicted_from=torch.cat([p + offset - 1 for p, offset in zip(positions, offsets, strict=True)]),
        targets=torch.cat([item.token_ids[p].long() for item, p in zip(items, positions, strict=True)]),
        segments=torch.repeat_interleave(torch.arange(len(items)), lengths),
        lengths=lengths,
        behavior_log_probs=_concatenate([t.behavior_log_probs for t in played]),
        advantages=None if rewarded else _concatenate([t.token_advantages() for t in played]),
        rewards=_concatenate([t.token_rewards() for t in played]) if rewarded else None,
        importance_weights=torch.ones(len(items)) if importance_weights is None else importance_weights.float(),
        ids=torch.full((len(items),), -1) if ids is None else ids,
        ages=torch.zeros(len(items), dtype=torch.float64) if ages is None else ages,
        phase=phase,
    )


def _concatenate(pieces: list[Tensor]) -> Tensor | None:
    return torch.cat(pieces) if pieces else None


def _filler(phase: Phase) -> TrajectoryBatch:
    zero, zeros = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return TrajectoryBatch(
        input_ids=zero[None],
        position_ids=zero[None],
        predicted_from=zero,
        targets=zero,
        segments=zero,
        lengths=torch.ones(1, dtype=torch.int64),
        behavior_log_probs=None if phase == "demonstration" else zeros,
        advantages=None if phase == "demonstration" else zeros,
        importance_weights=zeros,
        ids=zero[:0],
        ages=zeros.double()[:0],
        phase=phase,
        rewards=None if phase == "demonstration" else zeros,
    )
