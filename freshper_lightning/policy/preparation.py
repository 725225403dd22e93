"""What policy and critic say of an epoch's batches before the first update changes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from freshper_lightning.algorithms.advantages import Reduce
from freshper_lightning.algorithms.base import Algorithm
from freshper_lightning.algorithms.inputs import ValueInputs
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch, collate
from freshper_lightning.policy.scoring import evaluate
from freshper_lightning.trajectory import Trajectory

_ESTIMATION = (
    "estimator",
    "gamma",
    "gae_lambda",
    "rho_bar",
    "c_bar",
    "whiten",
    "advantage_clip",
    "kl_coefficient",
    "kl_in",
)
"""Settings of PPO that values, rewards and advantages depend on."""


def prepare(module: PolicyModule, batches: Sequence[TrajectoryBatch], reduce: Reduce) -> None:
    """Fill in, in place, ``proximal_log_probs`` of all micro-batches of an epoch, update after update.

    With a critic also ``values``, ``returns``, ``td_errors`` and ``advantages``, these whitened over each optimizer
    batch: that takes the advantages of all its micro-batches on all ranks before its first loss, for which the values
    of the losses' own forward passes come too late.

    One forward pass for each, in the packing and precision of the update, so that at the epoch's first update current
    and proximal policy agree. Fillers have theirs as well: every rank runs as many passes, and together they are a
    collective where parameters are sharded.

    Raises:
        ConfigurationError: A micro-batch of some rank is larger than ``max_micro_batch_tokens``.
    """
    for batch in batches:
        module.require_room(batch)
        _evaluate(module, batch)
    if module.algorithm.needs_critic():
        size = module.trainer.accumulate_grad_batches
        for first in range(0, len(batches), size):
            _normalize(module.algorithm, batches[first : first + size], reduce)


def prepared_under(module: PolicyModule) -> dict[str, float | str | bool | None]:
    """What :func:`prepare` goes by beside the weights, by the keys of the configuration."""
    algorithm = module.algorithm
    names = _ESTIMATION if algorithm.needs_critic() else ()
    settings = {f"model.algorithm.{name}": getattr(algorithm, name) for name in names}
    return {"model.algorithm": type(algorithm).__name__, "model.temperature": module.temperature, **settings}


def errors_under_critic(module: PolicyModule, trajectories: Sequence[Trajectory]) -> list[Tensor]:
    """Float32 [S] on the CPU for each trajectory: TD errors under the present critic; a collective."""
    found: list[Tensor] = []
    for part in module.scoring_passes(trajectories):
        batch = collate(part, phase="fresh")
        _evaluate(module, batch)
        if not batch.is_filler and batch.td_errors is not None:
            found += batch.td_errors.split(batch.lengths.tolist())
    return found


def _evaluate(module: PolicyModule, batch: TrajectoryBatch) -> None:
    moved, algorithm = batch.to(module.device), module.algorithm
    with module.trainer.precision_plugin.forward_context():
        if module.reference is not None and algorithm.needs_critic():
            moved.reference_log_probs = evaluate(module.reference, moved, module.temperature).log_probs
            batch.reference_log_probs = moved.reference_log_probs.cpu()
        log_probs, _, values = evaluate(module.policy, moved, module.temperature)
    batch.proximal_log_probs = log_probs.cpu()
    if values is not None and algorithm.needs_critic():
        _estimate(algorithm, batch, moved, log_probs, values)


def _estimate(
    algorithm: Algorithm, batch: TrajectoryBatch, moved: TrajectoryBatch, log_probs: Tensor, values: Tensor
) -> None:
    """Fill in what follows from values, out of ``moved``, which is the batch on the device of the network."""
    assert moved.rewards is not None
    assert moved.behavior_log_probs is not None
    given = (moved.rewards, values, moved.segments, moved.behavior_log_probs)
    found = algorithm.estimates(ValueInputs(*given, log_probs, moved.reference_log_probs))
    batch.values, batch.returns = values.cpu(), found.returns.cpu()
    batch.td_errors, batch.advantages = found.td_errors.cpu(), found.advantages.cpu()


def _normalize(algorithm: Algorithm, batches: Sequence[TrajectoryBatch], reduce: Reduce) -> None:
    """Whiten the advantages of one optimizer batch; the dummy tokens of fillers take no part."""
    filled = [batch for batch in batches if not batch.is_filler]
    pieces = [batch.token_advantages() for batch in filled]
    normalized = algorithm.normalized(torch.cat([torch.empty(0), *pieces]), reduce)
    for batch, piece in zip(filled, normalized.split([len(piece) for piece in pieces]), strict=True):
        batch.advantages = piece
