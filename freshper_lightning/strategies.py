"""Sharding over ranks with FSDP2."""

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from freshper_lightning.policy.net import PolicyNet


class FSDP2Strategy(ModelParallelStrategy):
    """Pure data parallelism with fully sharded parameters: every rank trains on its own trajectories.

    Lightning's own defaults would put all ranks of a node into tensor parallelism and give them equal batches.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Arguments are those of Lightning's ModelParallelStrategy, except the sizes of the mesh."""
        super().__init__(data_parallel_size="auto", tensor_parallel_size=1, **kwargs)

    def setup_environment(self) -> None:
        """Make the data-parallel dimension span all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, net: PolicyNet, mesh: Any) -> None:
        """Shard each decoder layer, a critic, and then the rest, head and embedding together, over the ranks.

        Under ``bf16-mixed`` ranks exchange and compute with bfloat16 copies, while the shards themselves, the
        gradients that are summed over ranks and the optimizer's state stay float32, and so does all of a critic.
        """
        mixed = self.precision_plugin.precision == "bf16-mixed"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        if net.critic is not None:
            fully_shard(net.critic, mesh=mesh["data_parallel"])
        for module in (*net.blocks(), net):
            fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)
