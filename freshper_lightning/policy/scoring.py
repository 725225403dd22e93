"""Log-probabilities of whole conversations under a network, outside of an update."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from freshper_lightning.policy.log_prob import TokenStatistics
from freshper_lightning.policy.lora import BasePolicy
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import TrajectoryBatch, collate, openings_of
from freshper_lightning.trajectory import Transcript

CONVERSATIONS_AT_ONCE = 8

T = TypeVar("T", bound=Transcript)


def chunks(conversations: Sequence[T], limit: int | None = None) -> list[list[T]]:
    """The conversations in order, as they share a forward pass: at most 8, and at most ``limit`` tokens in their rows.

    Rows take no more room than one for each conversation, as wide as the longest, does. A conversation that is longer
    than the limit is alone.
    """
    found: list[list[T]] = []
    longest = 0
    for item in conversations:
        longest, count = max(longest, item.num_tokens), len(found[-1]) if found else CONVERSATIONS_AT_ONCE
        if count < CONVERSATIONS_AT_ONCE and (limit is None or (count + 1) * longest <= limit):
            found[-1].append(item)
        else:
            found.append([item])
            longest = item.num_tokens
    return found


@torch.no_grad()
def evaluate(net: PolicyNet | BasePolicy, batch: TrajectoryBatch, temperature: float) -> TokenStatistics:
    """What ``net`` says of a batch on its device, outside of an update; a collective where weights are sharded.

    They are sharded again on return, as after a backward pass: those of the root would stay gathered without one.
    """
    statistics: TokenStatistics = net(**batch.forward_arguments(), temperature=temperature)
    weights = _weights(net)
    if isinstance(weights, FSDPModule):
        weights.reshard()
    return statistics


def _weights(net: PolicyNet | BasePolicy) -> PolicyNet:
    return net.net if isinstance(net, BasePolicy) else net


def token_log_probs(
    net: PolicyNet | BasePolicy, passes: Sequence[Sequence[Transcript]], temperature: float, device: torch.device
) -> list[Tensor]:
    """Float32 [S] on the CPU for each conversation: log-probabilities of its sampled tokens, a forward pass for each
    of ``passes``, of which any may be empty."""
    found: list[Tensor] = []
    for part in passes:
        transcripts = [Transcript(t.token_ids, t.turns) for t in part]
        openings = openings_of(transcripts) if _weights(net).shares_openings else None
        batch = collate(transcripts, phase="demonstration", openings=openings).to(device)
        log_probs = evaluate(net, batch, temperature).log_probs.float().cpu()
        found += log_probs.split(batch.lengths.tolist()) if part else ()
    return found
