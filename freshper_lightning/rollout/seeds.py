"""Seeds as pure functions of where in a run they are used; no global random state, nothing to save or restore."""

import json
from collections.abc import Sequence
from hashlib import blake2b


def stable_hash(*parts: int | str) -> int:
    """A number in [0, 2**63) that depends on ``parts``, their types and their order, and on nothing else.

    Equal in every process, on every machine and in every version of Python.
    """
    digest = blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_seed(key: Sequence[int], turn: int) -> int:
    """Seed of one reply; ``key`` identifies the episode: (run seed, iteration, group, member)."""
    return stable_hash("sampling", *key, turn)


def training_instance_seed(run_seed: int, iteration: int, group: int) -> int:
    """Seed of the instance that all members of a training group face; always even."""
    return stable_hash("training instance", run_seed, iteration, group) & ~1


def demonstration_instance_seed(run_seed: int, episode: int) -> int:
    """Seed of the instance of a demonstration; even, as everything that is trained on."""
    return stable_hash("demonstration instance", run_seed, episode) & ~1


def evaluation_instance_seed(instances: int, index: int) -> int:
    """Seed of a held-out instance, the same for every run; always odd, so that no training seed equals it.

    ``instances`` names a set of instances and ``index`` one of them.
    """
    return stable_hash("evaluation instance", instances, index) | 1
