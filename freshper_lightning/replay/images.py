"""Encoded images by content: each is stored once, however many trajectories show it."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freshper_lightning.replay.arena import Arena
from freshper_lightning.replay.codec import DIGEST_BYTES, Bytes, padded
from freshper_lightning.replay.columns import Integers

_PREFIX = 8
"""Bytes in front of an image that say how long it is."""


def image_nbytes(content: bytes) -> int:
    """Bytes that an image takes up, with its length and its name."""
    return _PREFIX + len(content) + -len(content) % 8 + DIGEST_BYTES


def complete_images(flat: Bytes, sizes: Integers) -> NDArray[np.bool_]:
    """bool [n]: which stored images, one after the other in ``flat``, are as long as they say."""
    starts = np.cumsum(sizes) - sizes
    lengths = flat.view(np.int64)[starts // _PREFIX]
    complete: NDArray[np.bool_] = (lengths >= 0) & (_PREFIX + lengths + -lengths % 8 == sizes)
    return complete


class ImageStore:
    """Every distinct image is there exactly as long as something refers to it.

    Args:
        directory: Where the content is kept in mapped files instead of memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._arena = Arena(directory)
        self._handles: dict[bytes, int] = {}
        self._counts: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._handles

    @property
    def nbytes(self) -> int:
        """Bytes of the images, their lengths and names."""
        return self._arena.nbytes + DIGEST_BYTES * len(self)

    @property
    def allocated(self) -> int:
        """Bytes that are held for images, used or not."""
        return self._arena.allocated + DIGEST_BYTES * len(self)

    def references(self, digest: bytes) -> int:
        """How often the image is referred to."""
        return self._counts[digest]

    def size(self, digest: bytes) -> int:
        """Bytes that would be free without the image."""
        return self._arena.size(self._handles[digest]) + DIGEST_BYTES

    def put(self, content: dict[bytes, bytes], uses: Iterable[bytes]) -> None:
        """Adds references, and the content (by digest) of those that are not stored yet."""
        new = [digest for digest in content if digest not in self._handles]
        blocks = [padded(len(content[digest]).to_bytes(_PREFIX, "little") + content[digest]) for digest in new]
        sizes = np.array([len(block) for block in blocks], np.int64)
        handles = self._arena.append(np.frombuffer(b"".join(blocks), np.uint8), sizes)
        self._handles.update(zip(new, handles.tolist(), strict=True))
        self._counts.update(uses)

    def get(self, digest: bytes) -> bytes:
        """Content of an image."""
        block = self._arena.view(self._handles[digest])
        length = int.from_bytes(block[:_PREFIX].tobytes(), "little")
        return block[_PREFIX : _PREFIX + length].tobytes()

    def release(self, uses: Iterable[bytes]) -> None:
        """Takes references away, and what nothing refers to any more."""
        uses = list(uses)
        self._counts.subtract(uses)
        gone = [digest for digest in dict.fromkeys(uses) if self._counts[digest] == 0]
        for digest in gone:
            del self._counts[digest]
        self._arena.free(np.array([self._handles.pop(digest) for digest in gone], np.int64))

    def packed(self) -> tuple[Bytes, Integers, Bytes]:
        """Content with lengths in front, size of each piece, and digests one after the other."""
        handles = np.array(list(self._handles.values()), np.int64)
        names = np.frombuffer(b"".join(self._handles), np.uint8).copy()
        return self._arena.gather(handles), self._arena.sizes(handles), names

    def load(self, content: Bytes, sizes: Integers, names: Bytes, uses: Iterable[bytes]) -> None:
        """Fills an empty store with what :meth:`packed` returned.

        Raises:
            KeyError: An image that is referred to is missing.
        """
        raw = names.tobytes()
        digests = [raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES)]
        handles = self._arena.append(content, sizes)
        self._handles = dict(zip(digests, handles.tolist(), strict=True))
        self._counts.update(uses)
        for digest in self._counts:
            if digest not in self._handles:
                raise KeyError(f"image {digest.hex()} of the saved replay buffer is missing")
