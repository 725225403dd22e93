"""Conversations packed into rows, and what a loss needs to know about their tokens."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from freshper_lightning.policy.rows import Block, Opening, cheapest_layout
from freshper_lightning.trajectory import Trajectory, Transcript

Phase = Literal["fresh", "replay", "demonstration"]


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
    """int64 [R, W]: of a token in its conversation; where no opening is shared, a 0 is where the next one begins."""
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
    spans: Tensor | None = None
    """int64 [2, R, W]: the piece of its row that a token is in, and the piece before it that it continues, or its own;
    None where no opening is shared."""
    ends_iteration: bool = False
    """Whether this is the last micro-batch of the iteration."""

    @property
    def skip(self) -> bool:
        """Whether the update must leave parameters and optimizer state as they are."""
        return self.total_sequences == 0

    def forward_arguments(self) -> dict[str, Tensor | None]:
        """What :meth:`PolicyNet.forward <freshper_lightning.policy.net.PolicyNet.forward>` needs of the batch."""
        names = ("input_ids", "position_ids", "predicted_from", "targets", "spans")
        return {name: getattr(self, name) for name in names}

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


def openings_of(items: Sequence[Transcript]) -> list[Opening]:
    """What each conversation begins with: all tokens ahead of the policy's first."""
    lengths = [int(item.turns[0, 0]) for item in items]
    return [
        Opening(item.token_ids[:length].numpy(force=True).tobytes(), length)
        for item, length in zip(items, lengths, strict=True)
    ]


def collate(
    items: Sequence[Transcript],
    *,
    phase: Phase,
    importance_weights: Tensor | None = None,
    ids: Tensor | None = None,
    ages: Tensor | None = None,
    openings: Sequence[Opening] | None = None,
) -> TrajectoryBatch:
    """Pack conversations into rows; an empty list gives a filler of zero weight.

    With their ``openings`` what several conversations begin with lies there once, where that is cheaper. The filler
    runs the model on one dummy token, so that forward and backward happen on every rank.
    """
    if not items:
        return _filler(phase)
    layout = cheapest_layout([item.num_tokens for item in items], openings)
    rows = _Rows(items, layout)
    lengths = torch.tensor([item.num_sampled for item in items])
    played = [item for item in items if isinstance(item, Trajectory)]
    rewarded = all(item.advantages is None for item in played)
    positions = [item.sampled_positions() for item in items]
    return TrajectoryBatch(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        spans=rows.spans if any(block.opening for row in layout for block in row) else None,
        predicted_from=torch.cat([rows.places(i, p - 1) for i, p in enumerate(positions)]),
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


class _Rows:
    """The tensors of a layout, and where in them the tokens of a conversation are."""

    def __init__(self, items: Sequence[Transcript], layout: Sequence[Sequence[Block]]) -> None:
        width = max(sum(block.length for block in row) for row in layout)
        # Left-over room is one more piece that starts at position 0, so that no conversation attends to it.
        self.input_ids = torch.zeros(len(layout), width, dtype=torch.int64)
        self.position_ids = torch.zeros(len(layout), width, dtype=torch.int64)
        self.spans = torch.zeros(2, len(layout), width, dtype=torch.int64)
        self._first: dict[int, tuple[int, int, int]] = {}
        """By conversation: tokens of the shared opening, where it lies, and where what follows does."""
        self._items = items
        for r, row in enumerate(layout):
            start, piece = 0, 1
            for block in row:
                self._put(r, start, piece, block)
                start, piece = start + block.length, piece + len(block.members) + 1
            self.position_ids[r, start:] = torch.arange(width - start)

    def _put(self, row: int, start: int, piece: int, block: Block) -> None:
        opening, offset = block.opening, row * self.input_ids.shape[1]
        self._fill(row, start, block.members[0], 0, opening, (piece, piece))
        end = start + opening
        for number, member in enumerate(block.members, piece + 1):
            self._first[member] = (opening, offset + start, offset + end)
            length = self._items[member].num_tokens
            self._fill(row, end, member, opening, length, (number, piece if opening else number))
            end += length - opening

    def _fill(self, row: int, start: int, member: int, first: int, last: int, span: tuple[int, int]) -> None:
        """Tokens ``first`` to ``last`` of a conversation, from column ``start`` on."""
        columns = slice(start, start + last - first)
        self.input_ids[row, columns] = self._items[member].token_ids[first:last]
        self.position_ids[row, columns] = torch.arange(first, last)
        self.spans[:, row, columns] = torch.tensor(span)[:, None]

    def places(self, member: int, positions: Tensor) -> Tensor:
        """int64: flat positions in the rows of the given ones in a conversation."""
        opening, shared, own = self._first[member]
        return torch.where(positions < opening, shared + positions, own + positions - opening)


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
