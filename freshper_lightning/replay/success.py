"""How often each prompt has been solved so far."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from freshper_lightning.trajectory import Trajectory

Prompt = tuple[str, int]
"""Task and seed, which together fix the instance of an environment."""


def prompt_of(trajectory: Trajectory) -> Prompt:
    """The prompt that a trajectory answers."""
    return trajectory.task, trajectory.seed


MOST_PROMPTS = 1 << 16
"""Prompts whose rates are kept, at some 200 bytes each, beside what a buffer's bytes count."""


class SuccessRates:
    """Running success rates by prompt, over everything that was collected, evicted trajectories included.

    Of more than ``MOST_PROMPTS`` prompts those that were not met for the longest time are forgotten.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[Prompt, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    @staticmethod
    def counted(trajectories: Iterable[Trajectory]) -> "SuccessRates":
        """Rates over some trajectories; one that was cut off ahead of its verdict has failed.

        Raises:
            ValueError: A trajectory has come to its end without a verdict.
        """
        rates = SuccessRates()
        for item in trajectories:
            if item.success is None and not item.truncated:
                raise ValueError(
                    f"a success rate needs the environment's verdict, which member {item.member} of group {item.group}"
                    f" of task {item.task!r} does not have"
                )
            rates.add(prompt_of(item), float(item.success or 0), 1.0)
        return rates

    def add(self, prompt: Prompt, successes: float, trials: float) -> None:
        """Counts trials of a prompt."""
        before = self._counts.pop(prompt, (0.0, 0.0))  # and so the prompt becomes the last
        self._counts[prompt] = before[0] + successes, before[1] + trials

    def merge(self, other: "SuccessRates") -> None:
        """Counts what the other has counted."""
        for prompt, counts in other._counts.items():
            self.add(prompt, *counts)
        while len(self) > MOST_PROMPTS:
            self._counts.popitem(last=False)

    def rate(self, prompt: Prompt, later: "SuccessRates") -> float:
        """Share of successes among the trials here and in ``later``, which together have at least one."""
        pairs = [rates._counts.get(prompt, (0.0, 0.0)) for rates in (self, later)]
        return sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)

    def state_dict(self, share: float = 1.0) -> dict[str, Any]:
        """Counts times ``share``, as tensors and primitives."""
        tasks = {task: index for index, task in enumerate(dict.fromkeys(task for task, _ in self._counts))}
        counts = [[share * value for value in pair] for pair in self._counts.values()]
        return {
            "tasks": list(tasks),
            "task": torch.tensor([tasks[task] for task, _ in self._counts], dtype=torch.int64),
            "seed": torch.tensor([seed for _, seed in self._counts], dtype=torch.int64),
            "counts": torch.tensor(counts, dtype=torch.float64).reshape(-1, 2),
        }

    @staticmethod
    def loaded(state: dict[str, Any]) -> "SuccessRates":
        """What :meth:`state_dict` has written."""
        rates = SuccessRates()
        tasks = [state["tasks"][index] for index in state["task"].tolist()]
        for task, seed, counts in zip(tasks, state["seed"].tolist(), state["counts"].tolist(), strict=True):
            rates.add((task, seed), *counts)
        return rates
