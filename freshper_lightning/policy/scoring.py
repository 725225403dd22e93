"""Log-probabilities of whole conversations under a network, outside of an update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from freshper_lightning.policy.lora import BasePolicy
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import collate
from freshper_lightning.trajectory import Transcript

CONVERSATIONS_AT_ONCE = 8


def num_passes(count: int) -> int:
    """Forward passes that ``count`` trajectories take; where parameters are sharded, ranks must agree on the most."""
    return -(-count // CONVERSATIONS_AT_ONCE)


@torch.no_grad()
def token_log_probs(
    net: PolicyNet | BasePolicy,
    trajectories: Sequence[Transcript],
    temperature: float,
    device: torch.device,
    passes: int,
) -> list[Tensor]:
    """Float32 [S] on the CPU for each trajectory: log-probabilities of its sampled tokens, in ``passes`` passes."""
    found: list[Tensor] = []
    for start in range(0, passes * CONVERSATIONS_AT_ONCE, CONVERSATIONS_AT_ONCE):
        part = [Transcript(t.token_ids, t.turns) for t in trajectories[start : start + CONVERSATIONS_AT_ONCE]]
        batch = collate(part, phase="demonstration").to(device)
        forward = (batch.input_ids, batch.position_ids, batch.predicted_from, batch.targets)
        log_probs = net(*forward, temperature).log_probs.float().cpu()
        found += log_probs.split(batch.lengths.tolist()) if part else ()
    return found
