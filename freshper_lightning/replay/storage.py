"""Where trajectories lie: encoded in an arena, their images beside them, each once."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freshper_lightning.replay.arena import Arena
from freshper_lightning.replay.codec import LogProbDtype, decode, digest_of, digests, encode
from freshper_lightning.replay.columns import Integers
from freshper_lightning.replay.images import ImageStore, image_nbytes
from freshper_lightning.trajectory import Trajectory

Packed = dict[str, Any]
"""Columns by name, contiguous tensors."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Trajectories, encoded and checked, that have not been stored yet."""

    blocks: list[bytes]
    images: dict[bytes, bytes]
    """Content by digest."""
    uses: list[bytes]
    """Digests, as often as they occur."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take up in an empty store."""
        images = sum(map(image_nbytes, self.images.values()))
        return sum(map(len, self.blocks)) + Arena.HANDLE_BYTES * len(self.blocks) + images


class TrajectoryStore:
    """Trajectories by handle, to the bit as they came in, except for log-probabilities that are stored as float16.

    Text is not stored. What comes out shares no memory with what is stored, nor with what came in.

    Args:
        log_probs: How log-probabilities of sampled tokens are stored.
        directory: Where the bytes are kept in mapped files instead of memory.
    """

    def __init__(self, log_probs: LogProbDtype = "float32", directory: Path | None = None) -> None:
        self._log_probs = log_probs
        self._arena = Arena(directory)
        self._images = ImageStore(directory)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self._arena.nbytes + Arena.HANDLE_BYTES * len(self._arena) + self._images.nbytes

    @property
    def image_nbytes(self) -> int:
        """The part of ``nbytes`` that is images."""
        return self._images.nbytes

    @property
    def allocated(self) -> int:
        """Bytes that are held, used or not."""
        return self._arena.allocated + self._images.allocated

    def stage(self, trajectories: Sequence[Trajectory]) -> Staged:
        """Encodes trajectories; nothing is stored.

        Raises:
            ValueError: One does not keep the types of :class:`~freshper_lightning.trajectory.Trajectory`.
        """
        names = [list(map(digest_of, trajectory.images)) for trajectory in trajectories]
        images = {
            name: content
            for digests_of_one, trajectory in zip(names, trajectories, strict=True)
            for name, content in zip(digests_of_one, trajectory.images, strict=True)
        }
        return Staged(encode(trajectories, names, self._log_probs), images, list(chain.from_iterable(names)))

    def growth(self, staged: Staged) -> int:
        """Bytes by which the store would grow."""
        known = sum(image_nbytes(staged.images[name]) for name in staged.images if name in self._images)
        return staged.nbytes - known

    def add(self, staged: Staged) -> Integers:
        """int64 [n]: handles of what is stored now.

        Raises:
            OSError: The disk is too full; what is stored is what was stored before.
        """
        self._images.put(staged.images, staged.uses)
        sizes = np.array([len(block) for block in staged.blocks], np.int64)
        try:
            return self._arena.append(np.frombuffer(b"".join(staged.blocks), np.uint8), sizes)
        except (OSError, MemoryError):
            self._images.release(staged.uses)
            raise

    def get(self, handles: Integers) -> tuple[Trajectory, ...]:
        """Trajectories, as new objects of which each owns its memory."""
        image = cache(self._images.get)
        return tuple(decode(block, image) for block in self._arena.read(handles))

    def shrinkage(self, kept: Staged) -> Callable[[int], int]:
        """A function that says by how much the store would shrink without one more handle, ``kept`` coming in."""
        gone: Counter[bytes] = Counter()

        def without(handle: int) -> int:
            size = self._arena.size(handle) + Arena.HANDLE_BYTES
            for name in digests(self._arena.view(handle)) if len(self._images) else ():
                gone[name] += 1
                if gone[name] == self._images.references(name) and name not in kept.images:
                    size += self._images.size(name)
            return size

        return without

    def remove(self, handles: Integers) -> None:
        """Frees trajectories, and the images that no other one shows."""
        if len(self._images):
            for handle in handles.tolist():
                self._images.release(digests(self._arena.view(handle)))
        self._arena.free(handles)

    def packed(self, handles: Integers) -> Packed:
        """Trajectories in the order of ``handles``, and all images; a copy in one piece."""
        images, image_sizes, image_names = self._images.packed()
        return {
            "blocks": torch.from_numpy(self._arena.gather(handles)),
            "sizes": torch.from_numpy(self._arena.sizes(handles)),
            "images": torch.from_numpy(images),
            "image_sizes": torch.from_numpy(image_sizes),
            "image_names": torch.from_numpy(image_names),
        }

    def load(self, packed: Packed) -> Integers:
        """Fills an empty store with what :meth:`packed` returned.

        Returns:
            int64 [n]: handles, in order.

        Raises:
            KeyError: A part, or an image, is missing.
            ValueError: The parts do not fit together.
        """
        handles = self._arena.append(packed["blocks"].numpy(), packed["sizes"].numpy())
        with_images = handles.tolist() if len(packed["image_sizes"]) else []
        uses = [name for handle in with_images for name in digests(self._arena.view(handle))]
        self._images.load(packed["images"].numpy(), packed["image_sizes"].numpy(), packed["image_names"].numpy(), uses)
        return handles
