"""What an engine must know about a checkpoint: where replies stop and which weights there are."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig


def stop_token_ids(path: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, else of the model's config, else the tokenizer's.

    Raises:
        ValueError: The checkpoint names none.
    """
    for source in _eos_sources(path):
        if source is not None:
            return tuple(source) if isinstance(source, list) else (int(source),)
    raise ValueError(f"checkpoint {path} names no eos_token_id, so that no reply would ever stop")


def _eos_sources(path: str | Path) -> Iterator[int | list[int] | None]:
    if (Path(path) / "generation_config.json").exists():
        yield GenerationConfig.from_pretrained(path).eos_token_id
    yield getattr(AutoConfig.from_pretrained(path), "eos_token_id", None)
    yield AutoTokenizer.from_pretrained(path).eos_token_id


class WeightNames:
    """The parameters of a model under all their names; names of one tied tensor form a group."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        groups: dict[int, tuple[str, ...]] = {}
        for name, parameter in self.parameters.items():
            groups[id(parameter)] = (*groups.get(id(parameter), ()), name)
        self._groups: Mapping[int, tuple[str, ...]] = groups

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of the tensor called ``name``, itself included."""
        return self._groups[id(self.parameters[name])]

    def checked(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream, tensor by tensor, detached; a tied tensor comes once, under the first name that was given.

        Raises:
            ValueError: A name is unknown, a shape differs, or the stream ended before every weight had come.
        """
        missing = set(self.parameters)
        for name, tensor in named_tensors:
            if name not in self.parameters:
                raise ValueError(f"the engine has no weight called {name!r}; it has {', '.join(self.parameters)}")
            if tensor.shape != self.parameters[name].shape:
                expected = list(self.parameters[name].shape)
                raise ValueError(f"weight {name!r} must have shape {expected}, not {list(tensor.shape)}")
            if name in missing:
                missing.difference_update(self.aliases(name))
                yield name, tensor.detach()
        if missing:
            raise ValueError(f"no value was given for {', '.join(sorted(missing))}")
