"""Sharding over ranks with FSDP2."""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

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
        """Shard each decoder layer and then the rest, head and embedding together, over the ranks."""
        data_parallel = mesh["data_parallel"]
        blocks = set(net.model._no_split_modules or ())
        for layer in [module for module in net.modules() if type(module).__name__ in blocks]:
            fully_shard(layer, mesh=data_parallel)
        fully_shard(net, mesh=data_parallel)
