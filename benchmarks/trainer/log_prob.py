"""Time and memory of the chunked log-probability against the plain one, on one thread.

python benchmarks/trainer/log_prob.py
python benchmarks/trainer/log_prob.py --vocabulary 32000 --chunks 64 128 256 --table /dev/stdout

Times are seconds of the processor, the least of several runs in which the variants alternate, so that whatever else the
machine does meets all of them. Memory is the growth of the largest resident size over that with the operands in place,
each in its own process.
"""

import argparse
import csv
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from freshper_lightning.policy.log_prob import CHUNK_BYTES, Readout, linear_log_probs

FIELDS = ("variant", "chunk_mib", "tokens", "hidden", "vocabulary", "pass", "seconds", "time_ratio", "peak_mib")
COSTS = ("memory_ratio", "repeats", "threads", "torch", "machine")
PASSES = ("forward", "forward_backward")

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK_BYTES >> 20], help="MiB of logits")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--table", type=Path, default=Path("docs/results/log_prob.csv"))
    parser.add_argument("--peak", nargs=2, metavar=("MIB", "PASS"), help="print the peak memory of one variant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (options.tokens, options.hidden, options.vocabulary)
    if options.peak:
        print(_peak_mib(shape, int(options.peak[0]), options.peak[1]))
        return
    rows = [row for name in PASSES for row in _measure(shape, options.chunks, options.repeats, name)]
    with options.table.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS + COSTS)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*(f"{key}={row[key]}" for key in ("variant", "chunk_mib", "pass", "seconds", "peak_mib")), flush=True)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities out of the logits of all tokens."""
    return linear(hidden, weight).log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def variant(chunk_mib: int) -> LogProbs:
    """The chunked log-probability; 0 stands for the plain one."""
    if chunk_mib == 0:
        return plain
    readout = Readout(chunk_bytes=chunk_mib << 20)
    return lambda hidden, weight, targets: linear_log_probs(hidden, weight, None, targets, readout).log_probs


def operands(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight and targets, such that logits have a standard deviation of about 3."""
    tokens, size, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=generator).mul_(3 / size**0.5)).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)


def once(log_probs: LogProbs, inputs: tuple[Tensor, Tensor, Tensor], name: str) -> None:
    """One pass, without what an earlier one left behind."""
    with torch.set_grad_enabled(name == "forward_backward"):
        loss = log_probs(*inputs).mean()
    if name == "forward_backward":
        loss.backward()
        for tensor in inputs:
            tensor.grad = None


def _measure(shape: tuple[int, int, int], chunks: list[int], repeats: int, name: str) -> list[dict[str, object]]:
    inputs, variants = operands(shape), [0, *chunks]
    seconds = dict.fromkeys(variants, float("inf"))
    for _ in range(repeats):
        for mib in variants:
            start = time.process_time()
            once(variant(mib), inputs, name)
            seconds[mib] = min(seconds[mib], time.process_time() - start)
    del inputs
    peaks = {mib: _in_another_process(shape, mib, name) for mib in variants}
    return [
        {
            "variant": "chunked" if mib else "plain",
            "chunk_mib": mib or "",
            "tokens": shape[0],
            "hidden": shape[1],
            "vocabulary": shape[2],
            "pass": name,
            "seconds": f"{seconds[mib]:.3f}",
            "time_ratio": f"{seconds[mib] / seconds[0]:.3f}",
            "peak_mib": f"{peaks[mib]:.0f}",
            "memory_ratio": f"{peaks[mib] / peaks[0]:.3f}",
            "repeats": repeats,
            "threads": 1,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        for mib in variants
    ]


def _in_another_process(shape: tuple[int, int, int], chunk_mib: int, name: str) -> float:
    sizes = [f"--{key}={value}" for key, value in zip(("tokens", "hidden", "vocabulary"), shape, strict=True)]
    command = [sys.executable, __file__, *sizes, "--peak", str(chunk_mib), name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout)


def _peak_mib(shape: tuple[int, int, int], chunk_mib: int, name: str) -> float:
    once(variant(chunk_mib), operands((2, shape[1], 64)), name)  # libraries allocate at first use
    inputs = operands(shape)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    once(variant(chunk_mib), inputs, name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return float(peak - pages * resource.getpagesize()) / 2**20


if __name__ == "__main__":
    main()
