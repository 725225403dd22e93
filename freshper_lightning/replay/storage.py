"""Where trajectories lie: ragged rows in memory, contiguous columns on disk, and exact accounting of bytes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freshper_lightning.trajectory import ClockReading, Trajectory

Packed = dict[str, Any]
"""Columns by name: contiguous tensors, and ``tasks``, a list of distinct strings."""

_RAGGED: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "token_ids": (torch.int32, ()),
    "turns": (torch.int32, (2,)),
    "behavior_log_probs": (torch.float32, ()),
    "rewards": (torch.float32, ()),
    "weight_versions": (torch.int64, ()),
    "advantages": (torch.float32, ()),
}
"""Type and inner shape of every tensor of a trajectory."""
_INTEGERS = ("group", "member", "seed", "invalid_turns")
_FLOATS = ("format_penalty", "group_mean", "group_std")
_SCALAR_BYTES = 8 * (len(_INTEGERS) + len(_FLOATS)) + 2 * 8 + 8 + 1 + 1
"""The numbers of a trajectory besides its tensors; after those by name: birth (2), task, success, truncation."""


def nbytes_of(trajectory: Trajectory) -> int:
    """Bytes of a trajectory's tensors, images and numbers; what Python's objects need on top is not counted."""
    tensors: list[Tensor | None] = [getattr(trajectory, name) for name in _RAGGED]
    images = sum(len(image) for image in trajectory.images)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) + images + _SCALAR_BYTES


def pack(trajectories: Sequence[Trajectory]) -> Packed:
    """Trajectories as contiguous columns, tensors and primitives only; :func:`unpack` returns them bit for bit.

    Raises:
        ValueError: A tensor does not have the type that its contract names, or an integer does not fit in 64 bits.
    """
    packed: Packed = {}
    for name, (dtype, inner) in _RAGGED.items():
        packed |= _pack_ragged(name, [getattr(item, name) for item in trajectories], dtype, inner)
    return packed | _pack_scalars(trajectories) | _pack_images([item.images for item in trajectories])


def _pack_ragged(name: str, rows: Sequence[Tensor | None], dtype: torch.dtype, inner: tuple[int, ...]) -> Packed:
    present = [row for row in rows if row is not None]
    for row in present:
        if row.dtype != dtype:
            raise ValueError(f"{name} of a trajectory must be {dtype}, not {row.dtype}")
    flat = torch.cat([torch.empty((0, *inner), dtype=dtype), *(row.detach().cpu() for row in present)])
    sizes = [-1 if row is None else len(row) for row in rows]
    return {name: flat, f"{name}_sizes": torch.tensor(sizes, dtype=torch.int64)}


def _pack_scalars(trajectories: Sequence[Trajectory]) -> Packed:
    tasks = {task: index for index, task in enumerate(dict.fromkeys(item.task for item in trajectories))}
    success = [-1 if item.success is None else int(item.success) for item in trajectories]
    return {
        **{name: _integers(name, [getattr(item, name) for item in trajectories]) for name in _INTEGERS},
        **{name: torch.tensor([getattr(item, name) for item in trajectories], dtype=torch.float64) for name in _FLOATS},
        "born_updates": _integers("born.updates", [item.born.updates for item in trajectories]),
        "born_iteration": _integers("born.iteration", [item.born.iteration for item in trajectories]),
        "success": torch.tensor(success, dtype=torch.int8),
        "truncated": torch.tensor([item.truncated for item in trajectories], dtype=torch.bool),
        "tasks": list(tasks),
        "task": torch.tensor([tasks[item.task] for item in trajectories], dtype=torch.int64),
    }


def _integers(name: str, values: Sequence[int]) -> Tensor:
    for value in values:
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} of a trajectory must fit in a signed 64-bit integer, not {value}")
    return torch.tensor(values, dtype=torch.int64)


def _pack_images(images: Sequence[tuple[bytes, ...]]) -> Packed:
    flat = [image for row in images for image in row]
    return {
        "image_bytes": torch.from_numpy(np.frombuffer(b"".join(flat), dtype=np.uint8).copy()),
        "image_sizes": torch.tensor([len(image) for image in flat], dtype=torch.int64),
        "image_counts": torch.tensor([len(row) for row in images], dtype=torch.int64),
    }


def unpack(packed: Packed) -> list[Trajectory]:
    """Inverse of :func:`pack`; each trajectory owns its memory, so that freeing it frees just its bytes.

    Raises:
        KeyError: A column is missing.
        ValueError: The columns do not fit together.
    """
    names = [*_RAGGED, *_INTEGERS, *_FLOATS, "born", "task", "success", "truncated", "images"]
    born = zip(packed["born_updates"].tolist(), packed["born_iteration"].tolist(), strict=True)
    columns: list[Iterable[Any]] = [
        *(_unpack_ragged(packed[name], packed[f"{name}_sizes"]) for name in _RAGGED),
        *(packed[name].tolist() for name in (*_INTEGERS, *_FLOATS)),
        (ClockReading(*reading) for reading in born),
        (packed["tasks"][index] for index in packed["task"].tolist()),
        (None if verdict < 0 else bool(verdict) for verdict in packed["success"].tolist()),
        packed["truncated"].tolist(),
        _unpack_images(packed),
    ]
    return [Trajectory(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _unpack_ragged(flat: Tensor, sizes: Tensor) -> Iterator[Tensor | None]:
    rows = iter(torch.split(flat, sizes.clamp(min=0).tolist()))
    return (None if size < 0 else row.clone() for row, size in zip(rows, sizes.tolist(), strict=True))


def _unpack_images(packed: Packed) -> Iterator[tuple[bytes, ...]]:
    content = packed["image_bytes"].numpy().tobytes()
    ends = accumulate(packed["image_sizes"].tolist(), initial=0)
    images = iter([content[start:end] for start, end in pairwise(ends)])
    return (tuple(next(images) for _ in range(count)) for count in packed["image_counts"].tolist())


class TrajectoryStore:
    """Trajectories by id, oldest first; every one is a copy, so that nobody outside can change what is stored.

    What is stored has gone through the same packing that a checkpoint goes through, so that a run which resumes sees
    the very bits that the uninterrupted run sees. Text is not stored.
    """

    def __init__(self) -> None:
        self._trajectories: dict[int, Trajectory] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._trajectories)

    @property
    def nbytes(self) -> int:
        """Sum of :func:`nbytes_of` over what is stored."""
        return self._nbytes

    def add(self, ids: Iterable[int], trajectories: Iterable[Trajectory]) -> None:
        """Stores trajectories, which the store takes over, under new ids greater than all before."""
        for key, trajectory in zip(ids, trajectories, strict=True):
            self._trajectories[key] = trajectory
            self._nbytes += nbytes_of(trajectory)

    def get(self, ids: Iterable[int]) -> tuple[Trajectory, ...]:
        """Trajectories in the order of ``ids``.

        Raises:
            KeyError: An id was evicted or never given; the message names it.
        """
        return tuple(self._trajectories[key] for key in ids)

    def sizes(self) -> Iterator[int]:
        """Bytes of each trajectory, oldest first, evaluated one by one."""
        return map(nbytes_of, self._trajectories.values())

    def remove(self, ids: Iterable[int]) -> None:
        """Frees trajectories.

        Raises:
            KeyError: An id is not stored.
        """
        for key in ids:
            self._nbytes -= nbytes_of(self._trajectories.pop(key))

    def packed(self) -> Packed:
        """All trajectories, oldest first, as :func:`pack` lays them out."""
        return pack(list(self._trajectories.values()))
