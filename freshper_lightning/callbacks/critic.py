"""What a critic says of trajectories before they are trained on."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from lightning import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.inputs import ValueInputs
from freshper_lightning.algorithms.ppo import PPO
from freshper_lightning.callbacks.parts import summing
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.packing import TrajectoryBatch, collate
from freshper_lightning.policy.scoring import CONVERSATIONS_AT_ONCE, num_passes
from freshper_lightning.replay import TDError
from freshper_lightning.trajectory import Trajectory


class CriticPass:
    """Forward passes without gradient by the present network: values, and what PPO makes of them.

    Whitening needs the advantages of a whole optimizer batch, of all micro-batches and ranks, ahead of the first loss,
    so that the values of the losses' own forward passes come too late. All methods are collectives.
    """

    def __init__(self, trainer: Trainer, module: PolicyModule, algorithm: PPO) -> None:
        self._trainer, self._module, self._algorithm = trainer, module, algorithm

    def prepare(self, batches: Sequence[TrajectoryBatch]) -> None:
        """Fill in advantages, returns, values and TD errors of an optimizer batch, whose micro-batches these are."""
        self._estimate(batches)
        filled = [batch for batch in batches if not batch.is_filler]
        pieces = [batch.token_advantages() for batch in filled]
        flat = torch.cat([torch.empty(0), *pieces])
        normalized = self._algorithm.normalized(flat, summing(self._trainer))
        for batch, piece in zip(filled, normalized.split([len(piece) for piece in pieces]), strict=True):
            batch.advantages = piece

    def priorities(self, priority: TDError, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """float64 [n]: base priorities of trajectories that have just been collected."""
        strategy = self._trainer.strategy
        own = torch.tensor(float(num_passes(len(trajectories))), device=self._module.device)
        passes = int(strategy.reduce(own, reduce_op="max"))
        parts = [trajectories[i * CONVERSATIONS_AT_ONCE : (i + 1) * CONVERSATIONS_AT_ONCE] for i in range(passes)]
        batches = [collate(part, phase="fresh") for part in parts]
        self._estimate(batches)
        filled = [batch for batch in batches if not batch.is_filler]
        return np.array([value for batch in filled for value in td_priorities(priority, batch)], np.float64)

    @torch.no_grad()
    def _estimate(self, batches: Sequence[TrajectoryBatch]) -> None:
        for batch in batches:
            self._estimate_one(batch)
        policy = self._module.policy
        if isinstance(policy, FSDPModule):
            policy.reshard()  # a backward pass would; without one the weights of the root stay gathered

    def _estimate_one(self, batch: TrajectoryBatch) -> None:
        module, there = self._module, batch.to(self._module.device)
        forward = (there.input_ids, there.position_ids, there.predicted_from, there.targets, module.temperature)
        with self._trainer.precision_plugin.forward_context():
            reference = None
            if module.reference is not None and self._algorithm.kl_in == "reward":
                reference = module.reference(*forward).log_probs
            seen = module.policy(*forward)
        rewards, behavior, values = there.rewards, there.behavior_log_probs, seen.values
        assert rewards is not None
        assert behavior is not None
        assert values is not None
        inputs = ValueInputs(rewards, values, there.segments, behavior, seen.log_probs, reference)
        found = self._algorithm.estimates(inputs)
        batch.advantages, batch.returns, batch.td_errors, batch.values = (
            tensor.cpu() for tensor in (found.advantages, found.returns, found.td_errors, values)
        )
        batch.reference_log_probs = None if reference is None else reference.cpu()


def bind_critic(trainer: Trainer, module: PolicyModule, data: ReplayDataModule) -> None:
    """Have every optimizer batch, and every new trajectory whose priority asks for it, seen by the critic first."""
    if not isinstance(module.algorithm, PPO):
        return
    critic, priority = CriticPass(trainer, module, module.algorithm), data.buffer.priority
    data.prepare = critic.prepare
    if isinstance(priority, TDError):
        data.measure = partial(critic.priorities, priority)


def td_priorities(priority: TDError, batch: TrajectoryBatch) -> list[float]:
    """Base priority of each trajectory of a batch: by the mean magnitude of its tokens' TD errors.

    Raises:
        ValueError: No critic has seen the batch.
    """
    if batch.td_errors is None:
        raise ValueError(f"priority {priority} needs TD errors, but no critic has seen the {batch.phase} batch")
    errors: tuple[Tensor, ...] = batch.td_errors.split(batch.lengths.tolist())
    return [priority.measured(piece) for piece in errors]
