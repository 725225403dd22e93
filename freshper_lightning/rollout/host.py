"""Keeps an engine that lives in the trainer's process from changing that process."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Undo what the body does to the process around it.

    Restored are the random states of Python, NumPy and torch, the number of threads and the function that sets it
    (vLLM replaces that by one that does nothing), the precision of float32 products, the environment except for
    ``VLLM_*`` (which vLLM reads as it goes), and what the garbage collector looks at. The binding of memory to a NUMA
    node, which vLLM makes on a CPU, cannot be undone.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, frozen = torch.get_float32_matmul_precision(), gc.get_freeze_count()
    try:
        with random_states_kept():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        if frozen == 0:
            gc.unfreeze()
        for name in [name for name in os.environ if not name.startswith("VLLM_") and name not in environment]:
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Undo the body's use of the global generators of Python, NumPy and torch."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with random_state_kept():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def modules_hidden(package: str) -> Iterator[None]:
    """Let the body look through ``sys.modules`` without finding ``package``, which goes on working for who has it.

    On a CPU vLLM looks into whatever the modules of the process hold, and llvmlite (under numba) holds an object that
    answers to every name, which ends the search with an error.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Undo the body's use of torch's global generators, those of the CPU and of the current CUDA device."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def default_group_kept() -> Iterator[None]:
    """Let the body destroy process groups of its own, but not the default one, which others use."""
    destroy = dist.destroy_process_group

    def destroy_own(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_own
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
