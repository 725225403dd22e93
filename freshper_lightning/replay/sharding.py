"""The states of N buffers as the states of M buffers, for a run that goes on with another number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshper_lightning.replay.codec import DIGEST_BYTES, Bytes, digests
from freshper_lightning.replay.columns import Integers
from freshper_lightning.replay.requirements import require, require_whole_number
from freshper_lightning.replay.success import SuccessRates
from freshper_lightning.replay.wholeness import checksum, require_whole

_EQUAL = ("clock", "priority")


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """State of one of the new buffers."""

    state: dict[str, Any]
    origins: Integers
    """int64 [n, 2]: for the trajectories in the order of their new ids, index of the old buffer and id in it."""


def reshard(states: Sequence[dict[str, Any]], shards: int) -> list[Shard]:
    """Spreads what some buffers hold over ``shards`` buffers; nothing is lost, doubled, or changed in priority or age.

    So every trajectory keeps its share of the mass of all buffers together. Groups, which are told apart by their
    number alone, stay together, and go one by one to the buffer that has the fewest trajectories. Ids are given anew,
    in the order of age. The number of evictions is divided, and counts of successes are divided evenly, which leaves
    all rates as they are.

    Raises:
        ValueError: There are no states, one is damaged, they do not belong together, or ``shards`` is below 1.
    """
    require(len(states) >= 1, "number of states", len(states), "at least 1")
    require_whole_number("shards", shards, 1)
    for state in states:
        require_whole(state)
    for name in _EQUAL:
        different = sorted({repr(state[name]) for state in states})
        require(len(different) == 1, f"{name} of the saved replay buffers", ", ".join(different), "one and the same")
    entries = _Entries.of(states)
    homes = _homes(entries.columns["groups"], shards)
    rates = SuccessRates()
    for state in states:
        rates.merge(SuccessRates.loaded(state["rates"]))
    common = {
        **{name: states[0][name] for name in ("format_version", *_EQUAL)},
        "draws": max(state["draws"] for state in states),
        "rates": rates.state_dict(1 / shards),
        "scale": max((state["scale"] for state in states), key=lambda scale: scale[0]),
    }
    evicted, more = divmod(sum(state["evicted"] for state in states), shards)
    return [
        entries.shard(np.flatnonzero(homes == home), common | {"evicted": evicted + (home < more)})
        for home in range(shards)
    ]


def _homes(groups: Integers, shards: int) -> Integers:
    """New buffer of each entry."""
    _, first, inverse, counts = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    homes, sizes = np.zeros(len(counts), np.int64), np.zeros(shards, np.int64)
    for group in np.argsort(first).tolist():
        homes[group] = np.argmin(sizes)
        sizes[homes[group]] += counts[group]
    spread: Integers = homes[inverse]
    return spread


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """All trajectories, oldest first."""

    columns: dict[str, NDArray[Any]]
    blocks: list[Bytes]
    images: dict[bytes, Bytes]
    origins: Integers

    @staticmethod
    def of(states: Sequence[dict[str, Any]]) -> "_Entries":
        every = [{name: column.numpy() for name, column in state["columns"].items()} for state in states]
        columns = {name: np.concatenate([one[name] for one in every]) for name in every[0]}
        owner = np.repeat(np.arange(len(every)), [len(one["ids"]) for one in every])
        order = np.lexsort((columns["ids"], owner, columns["added"]))
        packed = [state["trajectories"] for state in states]
        blocks = [block for one in packed for block in _split(one["blocks"], one["sizes"])]
        images = {}
        for one in packed:
            names = one["image_names"].numpy().reshape(-1, DIGEST_BYTES)
            contents = _split(one["images"], one["image_sizes"])
            images.update({name.tobytes(): content for name, content in zip(names, contents, strict=True)})
        return _Entries(
            {name: column[order] for name, column in columns.items()},
            [blocks[index] for index in order.tolist()],
            images,
            np.stack([owner, columns["ids"]], axis=1)[order],
        )

    def shard(self, chosen: Integers, common: dict[str, Any]) -> Shard:
        blocks, count = [self.blocks[index] for index in chosen.tolist()], len(chosen)
        shown = dict.fromkeys(name for block in blocks for name in digests(block)) if self.images else {}
        images = [self.images[name] for name in shown]
        columns = {name: column[chosen] for name, column in self.columns.items()}
        columns["ids"] = columns["rows"] = np.arange(count)
        rows = {name: torch.from_numpy(column.copy()) for name, column in columns.items()}
        trajectories = {
            "blocks": _joined(blocks),
            "sizes": _sizes(blocks),
            "images": _joined(images),
            "image_sizes": _sizes(images),
            "image_names": torch.from_numpy(np.frombuffer(b"".join(shown), np.uint8).copy()),
        }
        state = {
            **common,
            "next_id": count,
            "end": count,
            "checksum": checksum(rows, trajectories),
            "columns": rows,
            "trajectories": trajectories,
        }
        return Shard(state, self.origins[chosen])


def _split(flat: torch.Tensor, sizes: torch.Tensor) -> list[Bytes]:
    content, ends = flat.numpy(), np.cumsum(sizes.numpy())
    return [content[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def _joined(pieces: list[Bytes]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pieces]))


def _sizes(pieces: list[Bytes]) -> torch.Tensor:
    return torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
