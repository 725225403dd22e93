"""Weighted means over the updates of an iteration, and how they reach the loggers."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from lightning import Trainer
from torch import Tensor
from torchmetrics import MeanMetric


def _several_ranks() -> bool:
    """A group of one rank needs no collective; that of vLLM on a GPU has none for tensors in CPU memory."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _device_of_collectives() -> torch.device:
    on_gpu = _several_ranks() and dist.get_backend() == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class MetricBank:
    """Means by name since the last flush; a value with weight 0 keeps its name alive on every rank.

    The state is plain tensors, so that a run that is resumed inside an iteration reports what the uninterrupted one
    would have reported.
    """

    def __init__(self) -> None:
        self._means: dict[str, MeanMetric] = {}

    def update(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Count ``value`` (scalar, or a tensor of equally weighted values) towards the mean of ``name``."""
        values = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        weights = torch.as_tensor(weight, dtype=torch.float64).detach().cpu()
        self._mean(name).update(values, weights.expand_as(values))

    def _mean(self, name: str) -> MeanMetric:
        if name not in self._means:
            self._means[name] = MeanMetric(nan_strategy="error", distributed_available_fn=_several_ranks)
            self._means[name].set_dtype(torch.float64)
        return self._means[name]

    def flush(self) -> dict[str, float]:
        """The means over all ranks (a collective there), without those that nothing counted towards; starts anew."""
        results = {}
        for name in self._names_of_all_ranks():
            value = float(self._mean(name).to(_device_of_collectives()).compute())
            if not math.isnan(value):
                results[name] = value
        self._means.clear()
        return results

    def _names_of_all_ranks(self) -> list[str]:
        """A rank that lost its data has fewer names, and each name below is a collective."""
        names = set(self._means)
        if _several_ranks():
            gathered: list[set[str]] = [set() for _ in range(dist.get_world_size())]
            dist.all_gather_object(gathered, names)
            names = names.union(*gathered)
        for name in names - set(self._means):
            self.update(name, 0.0, 0.0)
        return sorted(names)

    def state_dict(self) -> dict[str, list[float]]:
        """Sum of values and sum of weights by name."""
        return {name: [float(m.mean_value), float(m.weight)] for name, m in self._means.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._means.clear()
        for name, (total, weight) in state.items():
            self.update(name, 0.0, 0.0)  # a metric that was never updated warns when it is read
            mean = self._mean(name)
            mean.mean_value, mean.weight = torch.tensor([total, weight], dtype=torch.float64)


def log_scalars(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Write scalars to every logger of the trainer at ``step``, counted in applied optimizer updates."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)
