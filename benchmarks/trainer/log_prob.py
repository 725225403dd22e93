"""Time and memory of the chunked log-probability against the plain one, on one thread.

python benchmarks/trainer/log_prob.py
python benchmarks/trainer/log_prob.py --tokens 512 --chunks 64 128 256 --table chunks.csv

Each run has a process of its own; runs of the variants alternate. Time is that of the processor, the least of all runs,
and memory the growth of the largest resident size over what was there with the operands in place, the most of all runs.
"""

import argparse
import csv
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from freshper_lightning.policy.log_prob import Readout, linear_log_probs

FIELDS = ("variant", "chunk_mib", "tokens", "hidden", "vocabulary", "pass", "seconds", "time_ratio", "peak_mib")
COSTS = ("memory_ratio", "repeats", "torch", "machine")
PASSES = ("forward", "forward_backward")

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Sizes of the problem."""

    tokens: int
    hidden: int
    vocabulary: int


class Cost(NamedTuple):
    """Of one run."""

    seconds: float
    peak_mib: float


def main() -> None:
    """Measure what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512], help="MiB of logits")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--table", type=Path, default=Path("docs/results/log_prob.csv"))
    parser.add_argument("--run", nargs=2, metavar=("MIB", "PASS"), help="print the cost of one run; 0 MiB is plain")
    options = parser.parse_args()
    shape = Shape(options.tokens, options.hidden, options.vocabulary)
    if options.run:
        print(*run(shape, int(options.run[0]), options.run[1]))
        return
    rows = [row for name in PASSES for row in compare(shape, options.chunks, options.repeats, name)]
    with options.table.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS + COSTS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def compare(shape: Shape, chunks: list[int], repeats: int, name: str) -> list[dict[str, object]]:
    """A row for the plain variant and one for each size of chunks."""
    costs: dict[int, Cost] = {}
    for _ in range(repeats):
        for mib in (0, *chunks):
            seen = _in_another_process(shape, mib, name)
            before = costs.get(mib, Cost(float("inf"), 0.0))
            costs[mib] = Cost(min(seen.seconds, before.seconds), max(seen.peak_mib, before.peak_mib))
            print(f"{name} chunk={mib} MiB: {seen.seconds:.2f} s, {seen.peak_mib:.0f} MiB", flush=True)
    return [
        shape._asdict()
        | {
            "variant": "chunked" if mib else "plain",
            "chunk_mib": mib or "",
            "pass": name,
            "seconds": f"{cost.seconds:.2f}",
            "time_ratio": f"{cost.seconds / costs[0].seconds:.3f}",
            "peak_mib": f"{cost.peak_mib:.0f}",
            "memory_ratio": f"{cost.peak_mib / costs[0].peak_mib:.3f}",
            "repeats": repeats,
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        for mib, cost in costs.items()
    ]


def _in_another_process(shape: Shape, chunk_mib: int, name: str) -> Cost:
    sizes = [f"--{key}={value}" for key, value in shape._asdict().items()]
    command = [sys.executable, __file__, *sizes, "--run", str(chunk_mib), name]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Cost(*map(float, printed.split()))


def run(shape: Shape, chunk_mib: int, name: str) -> Cost:
    """The cost of one pass in this process, which must not have made anything larger before."""
    torch.set_num_threads(1)
    once(variant(chunk_mib), operands(shape._replace(tokens=2, vocabulary=64)), name)  # sets libraries up
    inputs = operands(shape)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    start = time.process_time()
    once(variant(chunk_mib), inputs, name)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost(seconds, (peak - pages * resource.getpagesize()) / 2**20)


def variant(chunk_mib: int) -> LogProbs:
    """The chunked log-probability; 0 stands for the plain one."""
    if chunk_mib == 0:
        return plain
    readout = Readout(chunk_bytes=chunk_mib << 20)
    return lambda hidden, weight, targets: linear_log_probs(hidden, weight, None, targets, readout).log_probs


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities out of the logits of all tokens."""
    return linear(hidden, weight).log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight and targets, such that logits have a standard deviation of about 3."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=generator)
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=generator).mul_(3 / shape.hidden**0.5)
    targets = torch.randint(0, shape.vocabulary, (shape.tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def once(log_probs: LogProbs, inputs: tuple[Tensor, Tensor, Tensor], name: str) -> None:
    """One pass."""
    with torch.set_grad_enabled(name == "forward_backward"):
        loss = log_probs(*inputs).mean()
    if name == "forward_backward":
        loss.backward()


if __name__ == "__main__":
    main()
