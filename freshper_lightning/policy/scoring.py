"""Log-probabilities of whole conversations under a network, outside of an update."""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from freshper_lightning.policy.log_prob import TokenStatistics
from freshper_lightning.policy.lora import BasePolicy
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import TrajectoryBatch, collate
from freshper_lightning.trajectory import Transcript

CONVERSATIONS_AT_ONCE = 8


def num_passes(count: int) -> int:
    """Forward passes that ``count`` trajectories take; where parameters are sharded, ranks must agree on the most."""
    return -(-count // CONVERSATIONS_AT_ONCE)


def passes_of_all_ranks(strategy: Strategy, count: int) -> int:
    """The most passes that a rank takes, for ``count`` trajectories on this one; a collective."""
    own = torch.tensor(float(num_passes(count)), device=strategy.root_device)
    return int(strategy.reduce(own, reduce_op="max"))


@torch.no_grad()
def evaluate(net: PolicyNet | BasePolicy, batch: TrajectoryBatch, temperature: float) -> TokenStatistics:
    """What ``net`` says of a batch on its device, outside of an update; a collective where weights are sharded.

    They are sharded again on return, as after a backward pass: those of the root would stay gathered without one.
    """
    forward = (batch.input_ids, batch.position_ids, batch.predicted_from, batch.targets)
    statistics: TokenStatistics = net(*forward, temperature)
    weights = net.net if isinstance(net, BasePolicy) else net
    if isinstance(weights, FSDPModule):
        weights.reshard()
    return statistics


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
        log_probs = evaluate(net, batch, temperature).log_probs.float().cpu()
        found += log_probs.split(batch.lengths.tolist()) if part else ()
    return found
