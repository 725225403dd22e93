"""A trajectory as one block of bytes, and back; pure functions."""

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper_lightning.trajectory import ClockReading, Trajectory

Bytes = NDArray[np.uint8]
LogProbDtype = Literal["float32", "float16"]
ALIGNMENT = 8
"""Every block is a multiple of this long, so that each number in it can be read where it lies."""
DIGEST_BYTES = 16

_INTEGERS = ("group", "member", "seed", "invalid_turns")
_FLOATS = ("format_penalty", "group_mean", "group_std")
_BORN = tuple((item.name, "d" if item.type in (float, "float") else "q") for item in fields(ClockReading))
_values_of = attrgetter(*_INTEGERS, *_FLOATS, *(f"born.{name}" for name, _ in _BORN))
_HEADER = struct.Struct("<" + "q" * len(_INTEGERS) + "d" * len(_FLOATS) + "".join(kind for _, kind in _BORN) + "5ibB2x")
_TRUNCATED, _ADVANTAGES, _HALF = 1, 2, 4
_TENSORS = {
    "weight_versions": torch.int64,
    "token_ids": torch.int32,
    "turns": torch.int32,
    "rewards": torch.float32,
    "advantages": torch.float32,
    "behavior_log_probs": torch.float32,
}
"""Type of every tensor of a trajectory."""


def digest_of(content: bytes) -> bytes:
    """The name of an image: equal for equal content only, for all practical purposes (128 bits of BLAKE2b)."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def encode(
    trajectories: Sequence[Trajectory], images: Sequence[list[bytes]], log_probs: LogProbDtype = "float32"
) -> list[bytes]:
    """Trajectories, with ``images``, their digests, in place of their images; :func:`decode` returns them bit for bit.

    Log-probabilities exist for sampled tokens only; as ``float16`` they take half the room and are rounded to a
    relative 2**-11, and to an absolute 2**-25 where they are closer to 0 than 2**-14. A block describes itself: it can
    be moved between buffers as it is.

    Raises:
        ValueError: A tensor does not have the type that its contract names, or an integer does not fit in 64 bits, or a
            log-probability not in a ``float16``.
    """
    half = log_probs == "float16"
    tasks = [item.task.encode("utf-8", "surrogatepass") for item in trajectories]
    headers = [
        _pack_header(item, len(names), len(task), half)
        for item, names, task in zip(trajectories, images, tasks, strict=True)
    ]
    columns = [_pieces(name, list(map(attrgetter(name), trajectories)), half) for name in _TENSORS]
    rows = zip(headers, *columns, map(b"".join, images), tasks, strict=True)
    return [padded(b"".join(row)) for row in rows]


def _pieces(name: str, tensors: Sequence[Tensor | None], half: bool) -> list[memoryview]:
    """Bytes of each tensor; they are put together first, since a copy of many costs little more than one of one."""
    expected, present = _TENSORS[name], [tensor for tensor in tensors if tensor is not None]
    wrong = {tensor.dtype for tensor in present} - {expected}
    if wrong:
        raise ValueError(f"{name} of a trajectory must be {expected}, not {', '.join(sorted(map(str, wrong)))}")
    if not present:
        return [memoryview(b"")] * len(tensors)
    flat = torch.cat(present)
    flat = _halved(flat) if half and name == "behavior_log_probs" else flat
    content, width = flat.numpy(force=True).ravel().view(np.uint8).data, flat.element_size()
    ends = accumulate([0 if tensor is None else tensor.numel() * width for tensor in tensors], initial=0)
    return [content[start:end] for start, end in pairwise(ends)]


def _halved(log_probs: Tensor) -> Tensor:
    rounded = log_probs.half()
    lost = log_probs[rounded.isinf() & ~log_probs.isinf()]
    if len(lost):
        raise ValueError(
            f"behavior_log_probs of a trajectory must be at least {torch.finfo(torch.float16).min:g} to be stored as"
            f" float16, not {lost[0]:g}"
        )
    return rounded


def padded(block: bytes) -> bytes:
    """The block with as many zeros as alignment asks for."""
    return block + bytes(-len(block) % ALIGNMENT)


def _pack_header(trajectory: Trajectory, images: int, task: int, half: bool) -> bytes:
    has_advantages = trajectory.advantages is not None
    flags = _TRUNCATED * trajectory.truncated | _ADVANTAGES * has_advantages | _HALF * half
    success = -1 if trajectory.success is None else int(trajectory.success)
    # Not len(), which is slow on a tensor.
    lengths = trajectory.token_ids.numel(), trajectory.turns.numel() // 2, trajectory.behavior_log_probs.numel()
    try:
        return _HEADER.pack(*_values_of(trajectory), *lengths, images, task, success, flags)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{_misfits(trajectory)} of a trajectory must fit in a signed 64-bit integer") from error


def _misfits(trajectory: Trajectory) -> str:
    """Whatever does not fit into a header, with its name."""
    names = (*_INTEGERS, *(f"born.{name}" for name, kind in _BORN if kind == "q"))
    values = {name: attrgetter(name)(trajectory) for name in names}
    fits = {name: hasattr(value, "__index__") and -(2**63) <= value < 2**63 for name, value in values.items()}
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if not fits[name])


@dataclass(frozen=True, slots=True)
class _Layout:
    """The header of a block, and where its arrays begin."""

    scalars: tuple[Any, ...]
    tokens: int
    turns: int
    sampled: int
    images: int
    task: int
    success: int
    flags: int

    @staticmethod
    def of(block: Bytes) -> "_Layout":
        values = _HEADER.unpack_from(block.data)
        return _Layout(values[:-7], *values[-7:])

    @property
    def half(self) -> bool:
        return bool(self.flags & _HALF)

    def digests_at(self) -> int:
        turns = 8 + 8 + 4 + 4 * bool(self.flags & _ADVANTAGES)
        return _HEADER.size + 4 * self.tokens + turns * self.turns + (2 if self.half else 4) * self.sampled


def complete(flat: Bytes, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [n]: which encoded trajectories, one after the other in ``flat``, are as long as their headers say."""
    starts = np.cumsum(sizes) - sizes
    found = sizes >= _HEADER.size
    counts, success, flags = _ends_of_headers(flat, starts[found])
    tokens, turns, sampled, images, task = counts.T
    per_turn = 20 + 4 * (flags & _ADVANTAGES > 0)
    length = _HEADER.size + 4 * tokens + per_turn * turns + (4 - 2 * (flags & _HALF > 0)) * sampled
    length += DIGEST_BYTES * images + task
    possible = (counts >= 0).all(axis=1) & (turns >= 1) & (np.abs(success) <= 1)
    found[found] = possible & (length + -length % ALIGNMENT == sizes[found])
    return found


def possible_turns(flat: Bytes, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [n]: which encoded trajectories, one after the other in ``flat`` and complete, have turns that can be.

    Turns are non-empty, in order, behind the first token, inside the conversation, and as long as sampled tokens say.
    """
    starts = np.cumsum(sizes) - sizes
    tokens, turns, sampled = _ends_of_headers(flat, starts)[0][:, :3].T
    owner, last = np.repeat(np.arange(len(sizes)), turns), np.cumsum(turns)
    place = np.arange(len(owner)) - (last - turns)[owner]
    at = ((starts + _HEADER.size + 8 * turns + 4 * tokens)[owner] + 8 * place) // 4
    numbers = flat.view(np.int32)
    begins, ends = numbers[at].astype(np.int64), numbers[at + 1].astype(np.int64)
    before = np.where(place == 0, 1, np.roll(ends, 1))
    wrong = (begins < before) | (begins >= ends) | (ends > tokens[owner])
    lengths = np.bincount(owner, ends - begins, len(sizes))
    possible: NDArray[np.bool_] = (np.bincount(owner, wrong, len(sizes)) == 0) & (lengths == sampled)
    return possible


def showing(flat: Bytes, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which encoded trajectories, one after the other in ``flat`` and complete, have images."""
    shown: NDArray[np.int64] = np.flatnonzero(_ends_of_headers(flat, np.cumsum(sizes) - sizes)[0][:, 3])
    return shown


def _ends_of_headers(flat: Bytes, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int8], Bytes]:
    """Five counts [n, 5], success [n] and flags [n]: the end of a header, with two bytes of padding behind it."""
    first = starts + _HEADER.size - 24
    counts = flat.view(np.int32)[first[:, None] // 4 + np.arange(5)].astype(np.int64)
    return counts, flat[first + 20].view(np.int8), flat[first + 21]


def digests(block: Bytes) -> list[bytes]:
    """Names of the images of an encoded trajectory, in order, repeated as often as they occur."""
    layout = _Layout.of(block)
    start = layout.digests_at()
    return [
        block[at : at + DIGEST_BYTES].tobytes()
        for at in range(start, start + DIGEST_BYTES * layout.images, DIGEST_BYTES)
    ]


def decode(block: Bytes, image: Callable[[bytes], bytes]) -> Trajectory:
    """The trajectory of a block, whose tensors share the block's memory; the block must be the caller's own.

    What is in a block has been a valid trajectory, so it is not validated again.

    Args:
        block: uint8 [n], writable.
        image: Content of an image by its digest.
    """
    layout = _Layout.of(block)
    turns, at, tensors = layout.turns, _HEADER.size, {}
    for name, dtype, count in (
        ("weight_versions", np.int64, turns),
        ("token_ids", np.int32, layout.tokens),
        ("turns", np.int32, 2 * turns),
        ("rewards", np.float32, turns),
        ("advantages", np.float32, turns if layout.flags & _ADVANTAGES else 0),
        ("behavior_log_probs", np.float16 if layout.half else np.float32, layout.sampled),
    ):
        end = at + count * np.dtype(dtype).itemsize
        tensors[name], at = torch.from_numpy(block[at:end].view(dtype)), end
    text = at + DIGEST_BYTES * layout.images
    return _assembled(
        **_scalars(layout.scalars),
        **tensors
        | {
            "turns": tensors["turns"].view(turns, 2),
            "advantages": tensors["advantages"] if layout.flags & _ADVANTAGES else None,
            "behavior_log_probs": tensors["behavior_log_probs"].float(),
        },
        success=None if layout.success < 0 else bool(layout.success),
        truncated=bool(layout.flags & _TRUNCATED),
        images=tuple(map(image, digests(block))) if layout.images else (),
        task=sys.intern(block[text : text + layout.task].tobytes().decode("utf-8", "surrogatepass")),
    )


def _scalars(values: tuple[Any, ...]) -> dict[str, Any]:
    names = (*_INTEGERS, *_FLOATS)
    return {**dict(zip(names, values, strict=False)), "born": ClockReading(*values[len(names) :])}


def _assembled(**values: Any) -> Trajectory:
    """A trajectory of parts that have been one before."""
    trajectory, assign = object.__new__(Trajectory), object.__setattr__
    for name, value in values.items():
        assign(trajectory, name, value)
    return trajectory
