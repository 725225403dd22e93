"""How a token is drawn from logits: settings, processed distribution, and uniforms that depend on nothing global."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MIN_TEMPERATURE = 0.01
"""Least temperature above 0; below it vLLM silently samples at this one."""
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Changes of the sampling distribution that the trainer's log-probabilities do not follow; neutral by default.

    Raises:
        ValueError: A field is out of its range; the message names it.
    """

    top_p: float = 1.0
    """Keep the most likely tokens until they hold this probability; 1 keeps all."""
    top_k: int = 0
    """Keep so many most likely tokens; 0 keeps all."""
    min_tokens: int = 0
    """Sample no stop token before so many tokens."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or reply hold already; 1 changes none."""

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, not {self.top_k}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, not {self.min_tokens}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be positive and finite, not {self.repetition_penalty}")


@dataclass(frozen=True)
class SamplingConfig:
    """How replies are sampled; unless ``allow_mismatch`` is set, engine and trainer see one and the same distribution.

    ``top_p``, ``top_k``, ``min_tokens`` and ``repetition_penalty`` (see :class:`Truncation`) change what the engine
    samples from without the trainer knowing, so that importance ratios are wrong from the first update on; they are
    refused unless that is accepted by name.

    Raises:
        ValueError: A field is out of its range, or breaks parity without ``allow_mismatch``; the message names it.
    """

    temperature: float = 1.0
    """Divides the logits, in the engine and in the trainer; 0 is greedy and only fit for evaluation."""
    max_tokens: int = 40
    """Longest reply, in tokens."""
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    allow_mismatch: bool = False
    """Gives up the equality of the engine's and the trainer's log-probabilities."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or at least {MIN_TEMPERATURE} and finite, not {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        neutral = Truncation()
        for name in Truncation.__dataclass_fields__:
            value, allowed = getattr(self, name), getattr(neutral, name)
            if value != allowed and not self.allow_mismatch:
                raise ValueError(
                    f"{name}={value} makes the engine sample from another distribution than the trainer computes; "
                    f"use {name}={allowed}, or set allow_mismatch=true to give up their equality"
                )
        self.truncation()

    def truncation(self) -> Truncation:
        """The part that an engine is built with."""
        return Truncation(self.top_p, self.top_k, self.min_tokens, self.repetition_penalty)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and position [B]; a pure function with 53 random bits.

    Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), keyed by the
    mixed seed and stepped ``positions`` times.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + GOLDEN_GAMMA) + (positions + np.uint64(1)) * GOLDEN_GAMMA)
    result: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution in float64: log-probabilities [B, V], uniforms [B] -> token ids int64 [B].

    A token of probability 0 is never drawn.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were ``seen`` (bool [B, V]) less likely (Keskar et al., CTRL, 2019, section 4.1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [B, V], -inf outside of the ``top_k`` most likely tokens and of the smallest set that holds ``top_p``."""
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return logits
