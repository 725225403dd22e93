"""Whether a saved state is whole and its parts agree: asked before any of it is taken over."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshper_lightning.replay.codec import ALIGNMENT, DIGEST_BYTES, Bytes, complete, digests, possible_turns, showing
from freshper_lightning.replay.columns import SAVED_TYPES, Integers
from freshper_lightning.replay.images import complete_images
from freshper_lightning.replay.requirements import require

FORMAT_VERSION = 5
_NUMBERS = ("next_id", "evicted", "draws", "end", "checksum")
_PARTS = dict.fromkeys(_NUMBERS, int) | {"scale": list, "rates": dict, "columns": dict, "trajectories": dict}
_PACKED_TYPES: dict[str, type[np.generic]] = {
    "blocks": np.uint8,
    "sizes": np.int64,
    "images": np.uint8,
    "image_sizes": np.int64,
    "image_names": np.uint8,
}
Arrays = dict[str, NDArray[Any]]


def checksum(columns: Mapping[str, torch.Tensor], trajectories: Mapping[str, torch.Tensor]) -> int:
    """CRC-32 of all tensors of a state in the order of their names: it notices what was changed by accident."""
    value = 0
    for tensors in (columns, trajectories):
        for name in sorted(tensors):
            value = zlib.crc32(np.ascontiguousarray(tensors[name].numpy()).data, value)
    return value


def require_whole(state: Mapping[str, Any]) -> None:
    """Does nothing if a state could come from a replay buffer of this version, and has come undamaged.

    Raises:
        ValueError: It could not, or has not; the message names the part.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of a replay buffer must be a dict, not {type(state).__name__}")
    version = state.get("format_version")
    require(version == FORMAT_VERSION, "format_version of the saved replay buffer", version, repr(FORMAT_VERSION))
    for name, kind in _PARTS.items():
        _require(name in state, name, "is missing")
        _require(isinstance(state[name], kind), name, f"must be {kind.__name__}, not {type(state[name]).__name__}")
    for name in _NUMBERS:
        _require(state[name] >= 0, name, f"must be at least 0, not {state[name]}")
    scale = state["scale"]
    numbers = len(scale) == 3 and all(isinstance(value, float) and math.isfinite(value) for value in scale)
    _require(numbers, "scale", f"must be three finite numbers, not {scale}")
    columns = _arrays("columns", state["columns"], SAVED_TYPES)
    _require_columns(columns, state["next_id"], state["end"])
    _require_trajectories(_arrays("trajectories", state["trajectories"], _PACKED_TYPES), len(columns["ids"]))
    _require_rates(state["rates"])
    found = checksum(state["columns"], state["trajectories"])
    _require(found == state["checksum"], "checksum", f"is {state['checksum']}, but that of its tensors is {found}")


def _require(holds: bool | np.bool_, part: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"the saved replay buffer is damaged: {part} {problem}")


def _arrays(part: str, tensors: Mapping[str, Any], types: Mapping[str, type[np.generic]]) -> Arrays:
    arrays = {}
    for name, kind in types.items():
        tensor = tensors.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"the saved replay buffer is damaged: {part}.{name} is missing")
        wanted = torch.from_numpy(np.empty(0, kind)).dtype
        same = tensor.ndim == 1 and tensor.dtype == wanted and tensor.device.type == "cpu"
        _require(same, f"{part}.{name}", f"must be {wanted} [n] on the CPU, not {tensor.dtype} {list(tensor.shape)}")
        arrays[name] = tensor.numpy()
    return arrays


def _require_columns(columns: Arrays, next_id: int, end: int) -> None:
    for name, column in columns.items():
        count = len(columns["ids"])
        _require(len(column) == count, f"columns.{name}", f"must have {count} entries, not {len(column)}")
    for name, bound in (("ids", next_id), ("rows", end)):
        known = np.concatenate([[-1], columns[name], [bound]])
        _require((np.diff(known) > 0).all(), f"columns.{name}", f"must increase from 0 to below {bound}")
    added, since = columns["added"], columns["since"]
    _require(np.isfinite(added).all() and (np.diff(added) >= 0).all(), "columns.added", "must be finite and never fall")
    _require(
        np.isfinite(since).all() and (since >= added).all(), "columns.since", "must be finite and not before added"
    )
    _require((columns["log_base"] < np.inf).all(), "columns.log_base", "must be finite, or -inf")
    _require((columns["log_fresh"] <= 0).all(), "columns.log_fresh", "must be at most 0")
    _require((columns["draws"] >= 0).all(), "columns.draws", "must be at least 0")


def _require_trajectories(packed: Arrays, count: int) -> None:
    sizes, found = packed["sizes"], len(packed["sizes"])
    _require(found == count, "trajectories", f"must be {count}, one for each id, not {found}")
    for name, lengths in (("blocks", sizes), ("images", packed["image_sizes"])):
        whole = (lengths > 0).all() and not (lengths % ALIGNMENT).any() and int(lengths.sum()) == len(packed[name])
        _require(whole, f"trajectories.{name}", f"have {len(packed[name])} bytes, other than their sizes say")
    blocks = np.ascontiguousarray(packed["blocks"])
    wrong = np.flatnonzero(~complete(blocks, sizes))
    _require(len(wrong) == 0, "trajectories.blocks", f"do not fit their headers, {len(wrong)} of {count}")
    wrong = np.flatnonzero(~possible_turns(blocks, sizes))
    _require(len(wrong) == 0, "trajectories.blocks", f"have impossible turns, {len(wrong)} of {count}")
    whole = complete_images(np.ascontiguousarray(packed["images"]), packed["image_sizes"]).all()
    _require(whole, "trajectories.images", "do not have the lengths that they name")
    names = packed["image_names"]
    known = {names[at : at + DIGEST_BYTES].tobytes() for at in range(0, len(names), DIGEST_BYTES)}
    fits = len(names) == DIGEST_BYTES * len(packed["image_sizes"]) == DIGEST_BYTES * len(known)
    _require(fits, "trajectories.image_names", "must be one for each image, all distinct")
    same = _shown(blocks, sizes) == known
    _require(same, "trajectories.images", "must be those that trajectories show, and no others")


def _shown(blocks: Bytes, sizes: Integers) -> set[bytes]:
    """Names of the images of encoded trajectories."""
    indices, ends = showing(blocks, sizes), np.cumsum(sizes)
    pieces = (blocks[ends[index] - sizes[index] : ends[index]] for index in indices.tolist())
    return {name for piece in pieces for name in digests(piece)}


def _require_rates(rates: Mapping[str, Any]) -> None:
    tasks, counts = rates.get("tasks"), rates.get("counts")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise ValueError("the saved replay buffer is damaged: rates.tasks must be a list of names")
    if not isinstance(counts, torch.Tensor) or counts.ndim != 2 or counts.shape[1] != 2:
        raise ValueError("the saved replay buffer is damaged: rates.counts must be a tensor [n, 2]")
    arrays, pairs = _arrays("rates", rates, {"task": np.int64, "seed": np.int64}), counts.numpy()
    equal = len(arrays["task"]) == len(arrays["seed"]) == len(pairs)
    _require(equal, "rates", "must have a task, a seed and counts of each prompt")
    known = (arrays["task"] >= 0) & (arrays["task"] < len(tasks))
    _require(known.all(), "rates.task", f"must be below {len(tasks)}, the number of tasks")
    possible = (pairs[:, 0] >= 0) & (pairs[:, 0] <= pairs[:, 1]) & (pairs[:, 1] < np.inf)
    _require(possible.all(), "rates.counts", "must be successes, and at least as many trials")
