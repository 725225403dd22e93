"""What the policy says of an epoch's batches before the first update changes it."""

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch


@torch.no_grad()
def prepare(module: PolicyModule, batches: Sequence[TrajectoryBatch]) -> None:
    """Fill in, in place, ``proximal_log_probs`` of all micro-batches of an epoch, update after update.

    One forward pass for each, in the packing and precision of the update, so that at the epoch's first update current
    and proximal policy agree. Fillers have theirs as well: every rank runs as many passes, and together they are a
    collective where parameters are sharded.

    Raises:
        ConfigurationError: A micro-batch is larger than ``max_micro_batch_tokens``.
    """
    policy = module.policy
    for batch in batches:
        module.require_room(batch)
        moved = batch.to(module.device)
        forward = (moved.input_ids, moved.position_ids, moved.predicted_from, moved.targets)
        with module.trainer.precision_plugin.forward_context():
            batch.proximal_log_probs = policy(*forward, module.temperature).log_probs.cpu()
    if isinstance(policy, FSDPModule):
        policy.reshard()  # a backward pass would; without one the weights of the root stay gathered
