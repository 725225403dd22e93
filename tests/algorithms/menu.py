"""Every loss that can be configured: a new class, or a new value of a choice that a loss reads, is in it by itself."""

import dataclasses
from itertools import product
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from freshper_lightning.algorithms import PPO, Algorithm, LossInputs, Reinforce
from freshper_lightning.algorithms.losses import aggregation_coefficients

ELSEWHERE = ("baseline", "aggregation", "kl_in", "kl_estimator")
"""Choices that do not reach the policy term; they are varied one at a time."""

EXTRAS = (
    {"clip": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
    {"negative_mask": 0.1},
    {"correction": "importance_sampling", "weight_negative_only": True, "negative_mask": 0.1},
    {"entropy_coefficient": 0.1, "kl_coefficient": 0.2, "kl_estimator": "k2"},
    {"entropy_coefficient": 0.1, "kl_coefficient": 0.2, "kl_ratio": False},
    {"entropy_coefficient": 0.1, "kl_coefficient": 0.2},
    {"correction": "decoupled", "entropy_coefficient": 0.1, "kl_coefficient": 0.2},
)

EXTRAS_WITH_A_CRITIC = (
    {"value_clip": 0.2},
    {"estimator": "vtrace", "correction": "importance_sampling", "weight_cap": 1.0},
    {"correction": "decoupled", "value_clip": 0.2, "kl_coefficient": 0.2},
    {"kl_coefficient": 0.2, "kl_in": "reward", "kl_estimator": "k1", "entropy_coefficient": 0.1},
)

CRITIC = ("values", "old_values", "returns", "td_errors")
"""What nothing but a loss with a critic reads."""


def subclasses(base: type) -> list[type]:
    found = [base] if not getattr(base, "__abstractmethods__", None) else []
    for child in base.__subclasses__():
        found += subclasses(child)
    return [cls for cls in found if cls.__module__.startswith("freshper_lightning.")]


def built(cls: type) -> Algorithm:
    """The class as it comes, with a length where it asks for one."""
    try:
        return cls()
    except ValueError as error:
        if "aggregation_length" not in str(error):
            raise
        return cls(aggregation_length=4.0)


def choices_of_the_policy_term() -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(Reinforce)
    names = [field.name for field in dataclasses.fields(Reinforce) if field.name not in ELSEWHERE]
    return {name: get_args(hints[name]) for name in names if get_origin(hints[name]) is Literal}


def combinations() -> list[Reinforce]:
    """All that do not contradict one another."""
    choices, found = choices_of_the_policy_term(), []
    for values in product(*choices.values()):
        try:
            found.append(Reinforce(**dict(zip(choices, values, strict=True))))
        except ValueError as error:
            if "allows only" not in str(error):
                raise
    return found


def name_of(algorithm: Algorithm) -> str:
    changed = [
        f"{field.name}={getattr(algorithm, field.name)}"
        for field in dataclasses.fields(algorithm)
        if getattr(algorithm, field.name) != field.default
    ]
    return "-".join([type(algorithm).__name__, *changed])


MENU = list(
    dict.fromkeys(
        [built(cls) for cls in subclasses(Algorithm)]
        + combinations()
        + [Reinforce(**e) for e in EXTRAS]
        + [PPO(**e) for e in EXTRAS_WITH_A_CRITIC]
    )
)
POLICIES = [algorithm for algorithm in MENU if isinstance(algorithm, Reinforce)]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_inputs(lengths: list[int], seed: int, drift: float = 0.4, **changes: Tensor) -> LossInputs:
    """Conversations of these lengths with everything that any loss reads, in float64."""
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)

    def normal() -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    log_probs = -normal().abs() - 0.1
    values = {
        "log_probs": log_probs.clone().requires_grad_(),
        "behavior_log_probs": log_probs + drift * normal(),
        "proximal_log_probs": log_probs + drift * normal(),
        "reference_log_probs": log_probs + drift * normal(),
        "advantages": normal(),
        "coefficients": normal().abs(),
        "importance_weights": normal().abs(),
        "segments": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "entropy": normal().abs().requires_grad_(),
        "values": normal().requires_grad_(),
        "old_values": normal(),
        "returns": normal(),
        "td_errors": normal(),
    }
    return LossInputs(**(values | changes))


def part_of(inputs: LossInputs, conversations: list[int]) -> LossInputs:
    """Some of the conversations, in this order; none is a part too."""
    rows = [(inputs.segments == index).nonzero()[:, 0] for index in conversations]
    chosen = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    values = {name: value[chosen] for name, value in fields.items() if name != "lengths" and value is not None}
    lengths = inputs.lengths[torch.tensor(conversations, dtype=torch.int64)]
    segments = torch.arange(len(conversations)).repeat_interleave(lengths)
    return LossInputs(**(values | {"lengths": lengths, "segments": segments}))


def gradient(algorithm: Algorithm, inputs: LossInputs) -> Tensor:
    inputs.log_probs.grad = None
    algorithm.loss(inputs).loss.backward()
    assert inputs.log_probs.grad is not None
    return inputs.log_probs.grad


def three_tokens(algorithm: Algorithm | None = None, **changes: Tensor) -> LossInputs:
    """Two tokens of one conversation and one of another, with ratios 2, 1 and 1/2 and advantages 1, -2 and -1.

    The log-probs are -1, -2 and -1/2, and the coefficients those of the algorithm, or 1/3.
    """
    log_probs = double(-1.0, -2.0, -0.5).requires_grad_()
    segments, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    if algorithm is None:
        coefficients = aggregation_coefficients("token_mean", segments, lengths, 3.0, 2.0)
    else:
        coefficients = algorithm.coefficients(segments, lengths, 3.0, 2.0)
    values = {
        "log_probs": log_probs,
        "behavior_log_probs": log_probs.detach() - double(2.0, 1.0, 0.5).log(),
        "advantages": double(1.0, -2.0, -1.0),
        "coefficients": coefficients.double(),
        "importance_weights": double(1.0, 1.0, 1.0),
        "segments": segments,
        "lengths": lengths,
    }
    return LossInputs(**(values | changes))
