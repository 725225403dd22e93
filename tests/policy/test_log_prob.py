"""The chunked log-probability against autograd of the plain one."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from freshper_lightning.policy.log_prob import Readout, linear_log_probs

TOKENS, HIDDEN, VOCABULARY = 7, 5, 11


def operands(dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return leaf(TOKENS, HIDDEN), leaf(VOCABULARY, HIDDEN), leaf(VOCABULARY) if bias else None, targets


def plain(hidden, weight, bias, targets, readout):
    """The formula, in whatever precision the operands have."""
    logits = linear(hidden, weight, bias)
    if readout.softcap is not None:
        logits = readout.softcap * torch.tanh(logits / readout.softcap)
    all_log_probs = (logits / readout.temperature).log_softmax(-1)
    return all_log_probs.gather(1, targets[:, None])[:, 0], -(all_log_probs.exp() * all_log_probs).sum(-1)


def gradients(outputs, leaves):
    """Of a sum with a different weight for each token and each output that has a gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for output, scale in zip(outputs[:2], (1.0, -0.7), strict=True):
        if output is not None and output.requires_grad:
            total = total + scale * (torch.linspace(-1, 2, len(output), dtype=torch.float64) * output).sum()
    return torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])


def rows(count, dtype=torch.float64):
    return count * VOCABULARY * dtype.itemsize


def assert_equal(seen, expected, tolerance=1e-12):
    assert (seen - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "readout",
    [
        Readout(),
        Readout(temperature=0.6, with_entropy=True),
        Readout(temperature=1.7, with_entropy=True, entropy_gradient=True),
        Readout(temperature=0.8, softcap=1.5),
        Readout(temperature=0.8, softcap=1.5, with_entropy=True, entropy_gradient=True),
    ],
)
def test_values_and_gradients_are_those_of_autograd_in_float64(readout, chunk, bias):
    hidden, weight, bias, targets = operands(bias=bias)
    seen = linear_log_probs(hidden, weight, bias, targets, replace(readout, chunk_bytes=rows(chunk)))
    log_probs, entropy = plain(hidden, weight, bias, targets, readout)
    assert_equal(seen.log_probs, log_probs)
    if not readout.with_entropy:
        assert seen.entropy is None
    else:
        assert_equal(seen.entropy, entropy)
        assert seen.entropy.requires_grad == readout.entropy_gradient
    leaves = (hidden, weight, bias)
    expected = gradients((log_probs, entropy if readout.entropy_gradient else None), leaves)
    for mine, theirs in zip(gradients(seen, leaves), expected, strict=True):
        assert_equal(mine, theirs)


def test_the_entropy_alone_can_be_differentiated():
    hidden, weight, _, targets = operands(bias=False)
    readout = Readout(with_entropy=True, entropy_gradient=True, chunk_bytes=rows(2))
    mine = torch.autograd.grad(linear_log_probs(hidden, weight, None, targets, readout).entropy.sum(), weight)
    theirs = torch.autograd.grad(plain(hidden, weight, None, targets, readout)[1].sum(), weight)
    assert_equal(mine[0], theirs[0])


class Largest(TorchDispatchMode):
    """The most elements that any tensor had that an operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logits_of_more_than_one_chunk_never_exist(entropy_gradient):
    hidden, weight, bias, targets = operands()
    readout = Readout(0.9, None, True, entropy_gradient, chunk_bytes=rows(2))
    with Largest() as seen:
        statistics = linear_log_probs(hidden, weight, bias, targets, readout)
        gradients(statistics, (hidden, weight, bias))
    assert 2 * VOCABULARY <= seen.elements <= VOCABULARY * HIDDEN
    with Largest() as seen:
        plain(hidden, weight, bias, targets, readout)
    assert seen.elements == TOKENS * VOCABULARY


def test_only_what_asks_for_a_gradient_gets_one():
    """As with a head that is frozen under adapters."""
    hidden, weight, bias, targets = operands()
    frozen = weight.detach(), bias.detach()
    linear_log_probs(hidden, *frozen, targets, Readout(chunk_bytes=rows(2))).log_probs.sum().backward()
    assert frozen[0].grad is frozen[1].grad is None
    expected = torch.autograd.grad(plain(hidden, *frozen, targets, Readout())[0].sum(), hidden)
    assert_equal(hidden.grad, expected[0])
    assert not linear_log_probs(hidden.detach(), *frozen, targets, Readout()).log_probs.requires_grad


@pytest.mark.parametrize("chunk", [2, 100])
def test_from_the_logits_on_bfloat16_operands_are_computed_with_in_float32(chunk):
    hidden, weight, bias, targets = operands(torch.bfloat16)
    readout = Readout(0.7, None, True, True, chunk_bytes=rows(chunk, torch.float32))
    seen = linear_log_probs(hidden, weight, bias, targets, readout)
    assert seen.log_probs.dtype == seen.entropy.dtype == torch.float32
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    log_probs, entropy = plain(*exact, targets, readout)
    assert_equal(seen.log_probs.double(), log_probs, 1e-6)
    assert_equal(seen.entropy.double(), entropy, 1e-6)
    expected = gradients((log_probs, entropy), exact)
    for mine, theirs in zip(gradients(seen, (hidden, weight, bias)), expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_equal(mine.double(), theirs, 2**-8)


def test_autocast_does_not_reach_the_head():
    hidden, weight, bias, targets = operands(torch.float32)
    outside = linear_log_probs(hidden, weight, bias, targets, Readout(chunk_bytes=1))
    expected = torch.autograd.grad(outside.log_probs.sum(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_log_probs(hidden, weight, bias, targets, Readout(chunk_bytes=1))
        gradient = torch.autograd.grad(inside.log_probs.sum(), weight)
    assert torch.equal(inside.log_probs, outside.log_probs)
    assert torch.equal(gradient[0], expected[0])


def test_the_gradient_of_the_weight_adds_to_what_is_there():
    """A tied head gets a gradient from the embedding as well, and one from every micro-batch."""
    hidden, weight, bias, targets = operands()
    for _ in range(2):
        linear_log_probs(hidden, weight, bias, targets, Readout(chunk_bytes=rows(3))).log_probs.sum().backward()
    expected = torch.autograd.grad(plain(hidden, weight, bias, targets, Readout())[0].sum(), weight)
    assert_equal(weight.grad, 2 * expected[0])
