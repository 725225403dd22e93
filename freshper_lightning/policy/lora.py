"""Low-rank adapters through peft: what trains, what an engine is given, and what a reference is."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.log_prob import TokenStatistics

if TYPE_CHECKING:
    from freshper_lightning.policy.net import PolicyNet

ADAPTER = "default"


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of rank ``r`` beside linear layers, W + (alpha / r) B A with B = 0 at first (arXiv:2106.09685).

    Raises:
        ValueError: A value is out of range, or peft is not installed.
    """

    r: int = 16
    """Rank of the adapters."""
    alpha: int = 32
    """Adapters are multiplied by alpha / r."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get one, or a regular expression for them; never embeddings or the output head."""
    dropout: float = 0.0
    """Must be 0: the engine samples without dropout, and a ratio compares log-probabilities of one policy."""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"lora.r must be at least 1, not {self.r}")
        if self.alpha < 1:
            raise ValueError(f"lora.alpha must be at least 1, not {self.alpha}")
        if self.dropout != 0:
            raise ValueError(f"lora.dropout must be 0, since the engine samples without dropout, not {self.dropout}")
        if find_spec("peft") is None:
            raise ValueError("lora needs the package peft; `pip install 'peft>=0.21,<0.22'` brings it")


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters into ``model`` that leave its output as it is; from then on nothing but them has a gradient.

    Where they start depends on the seed of torch alone, not on what has drawn from it before, so that all ranks agree.

    Raises:
        ConfigurationError: No layer, or one that cannot have an adapter here, is called as ``target_modules`` says.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer

    targets = settings.target_modules
    config = LoraConfig(r=settings.r, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed())
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise ConfigurationError(f"model.lora.target_modules={targets!r}: {error}") from error
    refused = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and (id(module) in refused or not isinstance(module, Linear)):
            raise ConfigurationError(
                f"model.lora.target_modules={targets!r} must name linear layers other than the output head, not {name}"
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter called ``name`` belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def merged_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without adapters, full tensor W + (alpha / r) B A) one by one; a collective where sharded.

    No parameter changes, unlike under peft's own merge, which also would not give back the same bits.
    """
    from peft.tuners.lora import Linear

    adapted = {f"{name}.base_layer.weight": m for name, m in model.named_modules() if isinstance(m, Linear)}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        tensor = whole(parameter)
        if name in adapted:
            tensor = tensor + _update(adapted[name])
        yield name.replace(".base_layer.", "."), tensor


def _update(layer: Any) -> Tensor:
    down, up = (whole(half[ADAPTER].weight) for half in (layer.lora_A, layer.lora_B))
    update: Tensor = (up @ down) * layer.scaling[ADAPTER]
    return update


def whole(parameter: Tensor) -> Tensor:
    """The parameter, detached; put together from all ranks where it is sharded, which is a collective."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class BasePolicy:
    """The policy before any training, out of the same weights: a network with its adapters at zero, without gradient.

    Under a sharding strategy it must run before the forward pass whose gradient is wanted, not between it and the
    backward pass.
    """

    def __init__(self, net: "PolicyNet") -> None:
        self.net = net

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> TokenStatistics:
        """As :meth:`PolicyNet.forward`."""
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(self.net.model, 0):
            statistics: TokenStatistics = self.net(*args, **kwargs)
        return statistics
