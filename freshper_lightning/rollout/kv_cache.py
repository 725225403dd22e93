"""Keys and values of conversations that may go on, so that a next turn costs its new tokens only."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KVRows:
    """Attention states of ``R`` conversations in ``W`` columns, some of which are holes.

    ``mask`` is true where a column holds a token of its row; the tokens of a row stand in order from left to right, and
    ``tokens[r]`` lists them. Each layer has keys and values [R, H, W, D].
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor
    tokens: tuple[Tokens, ...]

    def nbytes(self) -> int:
        """Memory of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def select(self, rows: Sequence[int]) -> "KVRows":
        """The given rows, without holes between their tokens, aligned to the right."""
        index = torch.tensor(rows, device=self.mask.device)
        mask = self.mask[index]
        width = int(mask.sum(1).max())
        columns = mask.to(torch.uint8).argsort(dim=1, stable=True)[:, -width:]
        layers = tuple((_gather(k, index, columns), _gather(v, index, columns)) for k, v in self.layers)
        return KVRows(layers, mask.gather(1, columns), tuple(self.tokens[row] for row in rows))

    def padded(self, width: int) -> "KVRows":
        """The same rows with empty columns on the left, ``width`` in all."""
        left = width - self.mask.shape[1]
        layers = tuple((pad(k, (0, 0, left, 0)), pad(v, (0, 0, left, 0))) for k, v in self.layers)
        return KVRows(layers, pad(self.mask, (left, 0)), self.tokens)

    @classmethod
    def read(cls, cache: DynamicCache, mask: Tensor, tokens: tuple[Tokens, ...]) -> "KVRows":
        """What a model has written to ``cache``."""
        layers = tuple(
            (layer.keys, layer.values)
            for layer in cache.layers
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        )
        return cls(layers, mask, tokens)

    def dynamic_cache(self) -> DynamicCache:
        """A cache that a model can append to; the rows themselves stay as they are."""
        return DynamicCache(self.layers)


def _gather(states: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return states[rows[:, None], :, columns].transpose(1, 2)


def concatenate(parts: Sequence[KVRows]) -> KVRows:
    """All rows of ``parts``, in order, aligned to the right."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask.shape[1] for part in parts)
    padded = [part.padded(width) for part in parts]
    layers = tuple(
        (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
        for layer in zip(*(part.layers for part in padded), strict=True)
    )
    return KVRows(layers, torch.cat([part.mask for part in padded]), sum((part.tokens for part in padded), ()))


@dataclass(frozen=True, slots=True)
class RowRef:
    """Where a conversation lies in a :class:`ConversationCache`, and how many of its tokens are known."""

    block: int
    row: int
    length: int


class ConversationCache:
    """Finds the longest known beginning of a prompt; what it hands out was computed with the present weights.

    Holds at most ``max_bytes`` of keys and values; whole batches are dropped, the least recently used one first.
    :meth:`clear` must be called when weights change.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[int, KVRows] = OrderedDict()
        self._index: dict[int, dict[bytes, RowRef]] = {}
        self._next_block = 0

    def nbytes(self) -> int:
        """Memory of all keys and values held."""
        return sum(block.nbytes() for block in self._blocks.values())

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._index.clear()

    def find(self, prompt: Tokens) -> RowRef | None:
        """The longest conversation that ``prompt`` starts with and goes beyond, token for token."""
        for length in sorted(self._index, reverse=True):
            if length < len(prompt) and (ref := self._index[length].get(prompt[:length].tobytes())):
                return ref
        return None

    def take(self, refs: Sequence[RowRef]) -> KVRows:
        """A copy of the rows, in the order of ``refs``; cheapest where rows of one block stand together."""
        parts = []
        for block, members in groupby(refs, key=lambda ref: ref.block):
            self._blocks.move_to_end(block)
            parts.append(self._blocks[block].select([ref.row for ref in members]))
        return concatenate(parts)

    def put(self, rows: KVRows) -> None:
        """Remember the rows, unless they alone exceed the bound."""
        size = rows.nbytes()
        if size > self.max_bytes:
            return
        while self.nbytes() + size > self.max_bytes:
            self._drop_oldest()
        block, self._next_block = self._next_block, self._next_block + 1
        self._blocks[block] = rows
        for row, tokens in enumerate(rows.tokens):
            self._index.setdefault(len(tokens), {})[tokens.tobytes()] = RowRef(block, row, len(tokens))

    def _drop_oldest(self) -> None:
        block, rows = self._blocks.popitem(last=False)
        for tokens in rows.tokens:
            same_length = self._index.get(len(tokens), {})
            ref = same_length.get(tokens.tobytes())
            if ref is not None and ref.block == block:
                del same_length[tokens.tobytes()]
                if not same_length:
                    del self._index[len(tokens)]
