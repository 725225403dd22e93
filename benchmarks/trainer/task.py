"""What both trainers are given and what is read off them. Needs nothing but Python: TRL has an environment apart."""

import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

LEARNING_RATE = 1e-6
"""TRL's default."""
CLIP_NORM = 1.0
"""Bound on the gradient's norm; TRL's default."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Completions of different lengths that both sides train on in place of sampling their own.

    One after the other in the order in which they are played: iterations, groups in them, members of those.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    log_probs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Job:
    """One run: ``iterations`` updates, each on whole groups that are sampled with the newest weights."""

    model: str
    """Folder of the checkpoint."""
    engine: str
    """What samples: ``vllm``, ``transformers``, or ``trl``, which samples with Transformers."""
    precision: str
    """``float32``, or ``bfloat16``: layers computed in it from float32 weights."""
    micro_batches: int
    checkpointing: bool
    groups: int
    group_size: int
    new_tokens: int
    """Of each completion, no fewer and no more."""
    iterations: int
    """The first of them is not measured."""
    seed: int
    prompts: list[str]
    """User messages in the order in which they are played, ``groups`` per iteration."""
    ragged: Ragged | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one iteration took, in seconds; whatever is not generation is training."""

    seconds: float
    generation: float
    """Sampling and all that it needs: weights that are sent to an engine, prompts, environments."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def training(self) -> float:
        """The rest: advantages, forward, backward, optimizer, logs."""
        return self.seconds - self.generation


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one process."""

    iterations: list[Measured]
    peak_mib: float
    """Largest resident size of the process."""
    start_mib: float
    """Resident size once libraries are imported, ahead of the model."""
    versions: str

    def middle(self) -> Measured:
        """Medians over the iterations but the first, which starts everything up."""
        counted = self.iterations[1:]
        return Measured(
            seconds=statistics.median(one.seconds for one in counted),
            generation=statistics.median(one.generation for one in counted),
            prompt_tokens=round(statistics.median(one.prompt_tokens for one in counted)),
            completion_tokens=round(statistics.median(one.completion_tokens for one in counted)),
        )


def prompt(seed: int) -> str:
    """The user message of an instance."""
    numbers = random.Random(seed)
    return f"What is {numbers.randint(10, 99)} plus {numbers.randint(10, 99)}? Answer with a number."


def reward(reply: str) -> float:
    """Share of the letter e: trivial, and different from one reply to the next."""
    return reply.count("e") / max(len(reply), 1)


def ragged_lengths(count: int, longest: int) -> list[int]:
    """Lengths spread evenly up to ``longest``, in an order that mixes short and long ones."""
    lengths = [max(1, longest * (index + 1) // count) for index in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def write(value: Job | Outcome, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(value)))


def read_job(path: Path) -> Job:
    """What :func:`write` wrote."""
    fields = json.loads(path.read_text())
    ragged = fields.pop("ragged")
    return Job(**fields, ragged=None if ragged is None else Ragged(**ragged))


def read_outcome(path: Path) -> Outcome:
    """What :func:`write` wrote."""
    fields = json.loads(path.read_text())
    iterations = [Measured(**one) for one in fields.pop("iterations")]
    return Outcome(iterations=iterations, **fields)


def resident_mib(line: str = "VmRSS") -> float:
    """Resident size of this process now, or with ``VmHWM`` the largest so far; Linux only."""
    for status in Path("/proc/self/status").read_text().splitlines():
        if status.startswith(line + ":"):
            return int(status.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {line}")
