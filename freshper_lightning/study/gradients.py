"""Gradients of losses on frozen trajectories, group by group, and what their inner products say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freshper_lightning.algorithms import LossInputs, Reinforce
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import collate, openings_of
from freshper_lightning.study.bootstrap import Floats
from freshper_lightning.study.sketch import CountSketch
from freshper_lightning.trajectory import Trajectory

LOSSES_AT_ONCE = 7
"""Losses whose gradients of all groups are in memory together; they share forward passes."""

SAME = 1e-4
"""Relative difference up to which two losses' weights of tokens are one: more than rounding makes at age 0."""

Groups = Sequence[Sequence[Trajectory]]


def log_prob_gradients(algorithm: Reinforce, groups: Groups, log_probs: Sequence[Tensor]) -> Tensor:
    """Float32 [S]: derivative of the loss of all trajectories, as one optimizer batch, by each token's log-probability.

    Args:
        algorithm: The loss; a proximal policy is the current one, as in the first update of an epoch.
        groups: Trajectories with advantages.
        log_probs: [S] of each trajectory under the current policy, in order.
    """
    items = [item for group in groups for item in group]
    current = torch.cat(list(log_probs)).requires_grad_()
    lengths = torch.tensor([item.num_sampled for item in items])
    segments = torch.arange(len(items)).repeat_interleave(lengths)
    inputs = LossInputs(
        log_probs=current,
        behavior_log_probs=torch.cat([item.behavior_log_probs for item in items]),
        advantages=torch.cat([item.token_advantages() for item in items]),
        coefficients=algorithm.coefficients(segments, lengths, float(len(segments)), float(len(items))),
        importance_weights=torch.ones(len(segments)),
        segments=segments,
        lengths=lengths,
        proximal_log_probs=current.detach(),
    )
    return torch.autograd.grad(algorithm.loss(inputs).loss, current)[0]


def group_gradients(
    net: PolicyNet,
    groups: Groups,
    by_token: Sequence[Tensor],
    temperature: float,
    device: torch.device,
    sketch: CountSketch,
) -> Tensor:
    """Float32 [losses, groups, dimension], on the CPU: the sketch of each group's share of the gradient of each loss.

    Args:
        net: The current policy.
        groups: The trajectories.
        by_token: For each loss, what :func:`log_prob_gradients` gives for ``groups``.
        temperature: Of sampling.
        device: Of the network.
        sketch: Of the gradient of all trainable parameters in their order.
    """
    parameters = [p for p in net.parameters() if p.requires_grad]
    sizes = [sum(item.num_sampled for item in group) for group in groups]
    found = torch.zeros(len(by_token), len(groups), sketch.dimension)
    shares = [loss.split(sizes) for loss in by_token]
    for index, group in enumerate(groups):
        weights = [share[index].to(device) for share in shares]
        if any(bool(weight.any()) for weight in weights):  # none is where all outcomes of the group are equal
            openings = openings_of(group) if net.shares_openings else None
            batch = collate(group, phase="replay", openings=openings).to(device)
            log_probs = net(**batch.forward_arguments(), temperature=temperature).log_probs
            found[:, index] = _weighted(log_probs, weights, parameters, sketch)
    return found


def _weighted(
    log_probs: Tensor, weights: Sequence[Tensor], parameters: Sequence[Tensor], sketch: CountSketch
) -> Tensor:
    """[losses, dimension]: sketch of the gradient of sum(weights x log-probs [S]); equal weights share a pass."""
    found: list[Tensor] = []
    for index, weight in enumerate(weights):
        same = [other for other in range(index) if torch.allclose(weight, weights[other], rtol=SAME, atol=0.0)]
        if same:
            found.append(found[same[0]])
        else:
            gradients = torch.autograd.grad(log_probs, parameters, weight, retain_graph=True)
            found.append(sketch(torch.cat([gradient.flatten() for gradient in gradients]).cpu()))
    return torch.stack(found)


@dataclass(frozen=True, eq=False)
class Products:
    """Inner products of gradients of ``n`` groups of the probe and of ``2 n`` fresh ones, in two halves."""

    probe: Floats
    """float64 [n, n]."""
    cross: Floats
    """float64 [n, 2 n]."""
    fresh: Floats
    """float64 [2 n, 2 n]."""


def products(left: Tensor, right: Tensor) -> Floats:
    """float64 [n, m]: inner products of rows [n, P] and [m, P]."""
    result: Floats = (left @ right.T).double().numpy()
    return result


def menu_products(
    net: PolicyNet,
    groups: Groups,
    by_token: Mapping[str, Tensor],
    fresh: Tensor,
    temperature: float,
    device: torch.device,
    sketch: CountSketch,
) -> Iterator[tuple[str, Products]]:
    """The products of every loss, whose derivative [S] by token is given, with the sketched fresh ones [2 n, D]."""
    of_fresh, names = products(fresh, fresh), list(by_token)
    for first in range(0, len(names), LOSSES_AT_ONCE):
        part = names[first : first + LOSSES_AT_ONCE]
        gradients = group_gradients(net, groups, [by_token[name] for name in part], temperature, device, sketch)
        for name, probe in zip(part, gradients, strict=True):
            yield name, Products(products(probe, probe), products(probe, fresh), of_fresh)
