"""Log-probabilities of given tokens from hidden states, without the logits of all of them at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 256 << 20
"""Largest size of one chunk's logits."""


class TokenStatistics(NamedTuple):
    """What the policy says about ``S`` given tokens, at the sampling temperature."""

    log_probs: Tensor
    """float32 [S]: natural log-probability of each token."""
    entropy: Tensor | None
    """float32 [S]: entropy of the whole distribution at each token, in nats, where asked for."""
    values: Tensor | None = None
    """float32 [S]: the critic's value of the state that the token was sampled in, where there is a critic."""


@dataclass(frozen=True, slots=True)
class Readout:
    """How the logits of the head become statistics of tokens."""

    temperature: float = 1.0
    """Divides the logits."""
    softcap: float | None = None
    """Bounds logits z to c tanh(z / c) ahead of the temperature, as Gemma 2 does."""
    with_entropy: bool = False
    """Whether the entropy is computed."""
    entropy_gradient: bool = False
    """Whether the entropy has a gradient, which takes a third chunk of memory."""
    chunk_bytes: int = CHUNK_BYTES
    """Largest size of one chunk's logits; one row at the least."""


def linear_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, readout: Readout
) -> TokenStatistics:
    """Statistics of ``targets`` [S] under the softmax of ``hidden`` [S, H] times ``weight`` [V, H] plus ``bias`` [V].

    Logits are float32 at least, whatever the precision of the operands and whatever autocast says. At no time are
    there logits of more than one chunk of tokens. Backward computes them again, unless one chunk is all there is, and
    adds up the gradient of ``weight`` in one buffer.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = _LinearLogProbs.apply(hidden, weight, bias, targets, readout)  # type: ignore[no-untyped-call]
    return TokenStatistics(*cast(tuple[Tensor, Tensor | None], outputs))


class _Head:
    """The output layer in float32 at least, applied to one chunk of tokens at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, readout: Readout) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.readout = readout
        self.rows = max(1, readout.chunk_bytes // (len(weight) * self.dtype.itemsize))

    def chunks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.rows):
            yield slice(start, min(start + self.rows, count))

    def buffer(self, count: int) -> Tensor:
        """Room for the logits of a chunk [C, V], used over and over: fresh memory costs a page fault per 4 KiB."""
        return self.weight.new_empty(min(self.rows, count), len(self.weight))

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Capped and tempered logits [C, V] of ``hidden`` [C, H], in ``out``."""
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        cap, temperature = self.readout.softcap, self.readout.temperature
        if cap is not None:
            out.div_(cap).tanh_().mul_(cap)
        return out if temperature == 1.0 else out.div_(temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the cap [C, V] where :meth:`logits` returned ``logits``; None stands for 1."""
        cap = self.readout.softcap
        return None if cap is None else (logits * (self.readout.temperature / cap)).square_().neg_().add_(1.0)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, readout: Readout
    ) -> tuple[Tensor, Tensor | None]:
        head, count = _Head(weight, bias, hidden.dtype, readout), len(targets)
        log_probs, log_sums, entropy = (hidden.new_empty(count, dtype=head.dtype) for _ in range(3))
        scratch, distribution = head.buffer(count), head.buffer(count)
        for rows in head.chunks(count):
            chunk = hidden[rows].to(head.dtype)
            logits = head.logits(chunk, out=scratch[: len(chunk)])
            all_log_probs = torch.log_softmax(logits, dim=-1, out=distribution[: len(chunk)])
            log_probs[rows] = _at(all_log_probs, targets[rows])
            log_sums[rows] = _at(logits, targets[rows]) - log_probs[rows]
            if readout.with_entropy:
                entropy[rows] = -torch.exp(all_log_probs, out=logits).mul_(all_log_probs).sum(dim=-1)
        keep = count <= head.rows and readout.softcap is None and any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, distribution if keep else None)
        ctx.set_materialize_grads(False)
        ctx.readout = readout
        if not readout.with_entropy:
            return log_probs, None
        if not readout.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_log_probs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropy, kept = ctx.saved_tensors
        head = _Head(weight, bias, hidden.dtype, ctx.readout)
        by_hidden, by_weight, by_bias = (
            torch.zeros_like(of) if needed else None
            for of, needed in zip((hidden, head.weight, head.bias), ctx.needs_input_grad[:3], strict=True)
        )
        upstream = _Upstream.of(by_log_probs, by_entropy, log_sums, entropy, ctx.readout)
        scratch, out = None if kept is not None else head.buffer(len(targets)), head.buffer(len(targets))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in head.chunks(len(targets)):
                chunk, slope, all_log_probs = hidden[rows].to(head.dtype), None, kept
                if scratch is not None:
                    logits = head.logits(chunk, out=scratch[: len(chunk)])
                    slope = head.slope(logits)
                    all_log_probs = logits.sub_(log_sums[rows, None])
                by_logits = upstream.by_logits(rows, all_log_probs, targets[rows], out=out[: len(chunk)])
                if slope is not None:
                    by_logits.mul_(slope)
                if by_hidden is not None:
                    by_hidden[rows] = by_logits @ head.weight
                if by_weight is not None:
                    by_weight.addmm_(by_logits.t(), chunk)
                if by_bias is not None:
                    by_bias += by_logits.sum(dim=0)
        return by_hidden, _like(by_weight, weight), _like(by_bias, bias), None, None


@dataclass(frozen=True, slots=True)
class _Upstream:
    """What backward is given, [S] each, divided by the temperature."""

    by_log_probs: Tensor
    by_entropy: Tensor | None
    entropy: Tensor

    @classmethod
    def of(
        cls, by_log_probs: Tensor | None, by_entropy: Tensor | None, like: Tensor, entropy: Tensor, readout: Readout
    ) -> "_Upstream":
        first = torch.zeros_like(like) if by_log_probs is None else by_log_probs / readout.temperature
        second = None
        if readout.entropy_gradient and by_entropy is not None:
            second = by_entropy / readout.temperature
        return cls(first, second, entropy)

    def by_logits(self, rows: slice, all_log_probs: Tensor, targets: Tensor, out: Tensor) -> Tensor:
        """Gradient [C, V] by the capped logits, in ``out``: g (1[target] - p) - h p (log p + entropy)."""
        g = self.by_log_probs[rows, None]
        torch.exp(all_log_probs, out=out)
        if self.by_entropy is None:
            out.mul_(-g)
        else:
            h = self.by_entropy[rows, None]
            out.mul_(torch.addcmul(-g - h * self.entropy[rows, None], all_log_probs, h, value=-1.0))
        return out.scatter_add_(1, targets[:, None], g)


def _at(values: Tensor, targets: Tensor) -> Tensor:
    return values.gather(1, targets[:, None])[:, 0]


def _like(gradient: Tensor | None, of: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(of.dtype)
