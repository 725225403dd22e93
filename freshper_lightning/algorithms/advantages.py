"""Advantages of freshly collected groups: group baseline, then whitening over the batch, then a clip.

All arithmetic is in float64; collectives come in as a callable, so that any number of ranks gives the same numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from freshper_lightning.trajectory import Trajectory

Baseline = Literal["none", "mean", "mean_std", "leave_one_out"]
"""What a return is set against: nothing, its group's mean, that in units of the group's deviation, the others' mean."""

BASELINES: tuple[str, ...] = get_args(Baseline)

Reduce = Callable[[Tensor], Tensor]
"""Sum of a float64 tensor over all ranks; called equally often on each of them, also where a rank has no data."""

Penalty = Callable[[Sequence[Trajectory]], Tensor]
"""Float64 [N]: what is taken off the return of each trajectory; called once on each rank, also where it has no data."""

EPSILON = 1e-6
"""Added to every standard deviation that divides; one of at most this, relative to max(1, |mean|), counts as zero."""


def compute_advantages(
    trajectories: Sequence[Trajectory],
    reduce: Reduce,
    *,
    baseline: Baseline,
    whiten: bool,
    clip: float | None,
    group_filter: float | None = None,
    penalty: Penalty | None = None,
) -> list[Trajectory]:
    """Every turn of an episode gets the episode's undiscounted advantage, once and for good.

    The outcome is the training return (score plus format penalty). REINFORCE++ (arXiv:2501.03262) is baseline ``none``
    with whitening, its variant with a baseline is ``mean`` with whitening, GRPO (arXiv:2402.03300) is ``mean_std``
    alone, Dr. GRPO (arXiv:2503.20783) is ``mean`` alone, RLOO (arXiv:2402.14740) is ``leave_one_out``, and FreshPER
    (arXiv:2604.16918) is ``mean_std``, whitening and a clip. Under a baseline a group of equal outcomes has advantage 0
    and takes no part in whitening, where REINFORCE++-baseline and FreshPER whiten it along: shifted by the mean over
    tokens of the others, it would get a push without an outcome behind it.

    Args:
        trajectories: Whole groups, in any order; may be empty on some ranks. A group never spans ranks.
        reduce: Sums a float64 tensor over ranks.
        baseline: See :func:`group_advantages`.
        whiten: See :func:`whitened`; each turn weighs as much as it has sampled tokens.
        clip: Largest absolute value of the result, or ``None``.
        group_filter: See :func:`informative`; ``None`` keeps all groups.
        penalty: Taken off the outcomes of what the filter has kept. ``mean_std`` divides by the deviation of outcomes
            without it, which in a group of equal ones would be the penalty's alone, and leaves these at 0; the other
            baselines have what the penalty makes of such a group.

    Returns:
        The trajectories that were kept, in the order given, with ``advantages`` [T], and with ``group_mean`` and
        ``group_std`` (biased) of their outcomes.

    Raises:
        ValueError: Groups of different sizes or of one member, a member that occurs twice, a return that is not
            finite, or a trajectory that has its advantages already; on some rank.
    """
    size = check_groups(trajectories, baseline, reduce)
    if group_filter is not None:
        trajectories = informative(trajectories, group_filter)
    returns, groups = outcomes(trajectories)
    group_mean, group_std = mean, std = group_statistics(returns, groups)
    if penalty is not None:
        returns = returns - penalty(trajectories)
        mean, spread = group_statistics(returns, groups)
        std = group_std if baseline == "mean_std" else spread
    turn_counts = torch.tensor([trajectory.num_turns for trajectory in trajectories], dtype=torch.int64)
    per_turn = group_advantages(returns, mean, std, size, baseline).repeat_interleave(turn_counts)
    if whiten:
        silent = (_is_constant(mean, std) & (baseline != "none")).repeat_interleave(turn_counts)
        weights = turn_weights(trajectories).masked_fill(silent, 0.0)
        per_turn = whitened(per_turn, weights, reduce).masked_fill(silent, 0.0)
    if clip is not None:
        per_turn = per_turn.clamp(-clip, clip)
    pieces = torch.split(per_turn, turn_counts.tolist())
    return [
        trajectory.with_advantages(piece, float(its_mean), float(its_std))
        for trajectory, piece, its_mean, its_std in zip(trajectories, pieces, group_mean, group_std, strict=True)
    ]


def informative(trajectories: Sequence[Trajectory], tolerance: float) -> list[Trajectory]:
    """The trajectories of groups whose outcomes deviate by more than ``tolerance`` (biased standard deviation).

    The rest is as if it had not been collected (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2, without
    sampling again): it takes no part in whitening, in the fresh pass and its counts, or in the replay buffer. The test
    is on training returns, before any KL penalty, which differs between members whose outcomes do not.
    """
    _, std = group_statistics(*outcomes(trajectories))
    return [trajectory for trajectory, deviation in zip(trajectories, std, strict=True) if deviation > tolerance]


def outcomes(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Training returns (float64 [N]) and groups (int64 [N])."""
    returns = torch.tensor([trajectory.training_return for trajectory in trajectories], dtype=torch.float64)
    return returns, torch.tensor([trajectory.group for trajectory in trajectories], dtype=torch.int64)


def group_statistics(returns: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Each entry's group mean and biased group standard deviation: two float64 [N] for returns and group ids [N]."""
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)

    def group_average(values: Tensor) -> Tensor:
        sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, index, values)
        return sums.div(sizes).index_select(0, index)

    mean = group_average(returns.double())
    return mean, group_average((returns - mean).square()).sqrt()


def group_advantages(returns: Tensor, mean: Tensor, std: Tensor, size: int, baseline: Baseline) -> Tensor:
    """Returns [N] against the statistics of their groups [N] of ``size``; equal returns in a group give exactly 0.

    ``none`` leaves the returns, ``mean`` subtracts the mean, ``mean_std`` also divides by std + ``EPSILON``, and
    ``leave_one_out`` subtracts the mean of the other members, which is ``mean`` times size / (size - 1).
    """
    if baseline == "none":
        return returns
    centered = _centered(returns, mean, std)
    if baseline == "leave_one_out":
        return centered * (size / (size - 1))
    return centered if baseline == "mean" else centered / (std + EPSILON)


def whitened(values: Tensor, weights: Tensor, reduce: Reduce) -> Tensor:
    """Values [K] shifted and scaled to weighted mean 0 and variance 1 over all ranks; equal values give exactly 0.

    The variance is biased (divided by the summed weights) and taken around the common mean in a second pass, because
    sums of squares cancel. The division is by std + ``EPSILON``. Values of weight 0 are not in the moments; without any
    weight there is nothing to shift or scale by. Calls ``reduce`` twice.
    """
    total, weighted_sum = reduce(torch.stack([weights.sum(), weights @ values])).unbind()
    total = total.masked_fill(total == 0, 1.0)
    mean = weighted_sum / total
    std = (reduce(weights @ (values - mean).square()) / total).sqrt()
    return _centered(values, mean, std) / (std + EPSILON)


def turn_weights(trajectories: Sequence[Trajectory]) -> Tensor:
    """Float64: sampled tokens of every turn of every trajectory, in order."""
    lengths = [trajectory.turn_lengths for trajectory in trajectories]
    return torch.cat([torch.empty(0, dtype=torch.int64), *lengths]).double()


def check_groups(trajectories: Sequence[Trajectory], baseline: Baseline, reduce: Reduce) -> int:
    """The size of a group (0 without trajectories); refuses, on all ranks, what would give silently wrong advantages.

    Ranks agree by one call of ``reduce``: one that stopped alone would leave the others waiting for it.

    Raises:
        ValueError: See :func:`compute_advantages`; or another rank's groups are refused.
    """
    sizes = Counter(trajectory.group for trajectory in trajectories)
    fault = next(_faults(trajectories, sizes, baseline), None)
    if float(reduce(torch.tensor(float(fault is not None), dtype=torch.float64))) > 0:
        raise ValueError(fault or "the groups of another rank are refused; its own error says why")
    return next(iter(sizes.values()), 0)


def _faults(trajectories: Sequence[Trajectory], sizes: Mapping[int, int], baseline: Baseline) -> Iterator[str]:
    members: dict[int, list[int]] = {}
    for trajectory in trajectories:
        yield from _faults_of(trajectory)
        members.setdefault(trajectory.group, []).append(trajectory.member)
    for group, present in members.items():
        if len(set(present)) < len(present):
            yield f"group {group} holds a member twice: {sorted(present)}"
    for (first, size), (second, other) in pairwise(sizes.items()):
        if size != other:
            yield f"all groups must be whole, but group {first} has {size} members and group {second} has {other}"
    if baseline != "none" and 1 in sizes.values():
        yield f"baseline {baseline!r} needs groups of at least 2 members: alone, every advantage would be 0"


def _faults_of(trajectory: Trajectory) -> Iterator[str]:
    name = f"member {trajectory.member} of group {trajectory.group}"
    if trajectory.advantages is not None:
        yield f"{name} has its advantages already; they are frozen at collection"
    if not math.isfinite(trajectory.training_return):
        yield f"{name} has the training return {trajectory.training_return}, which is not finite"


def _is_constant(mean: Tensor, std: Tensor) -> Tensor:
    """Where a deviation is nothing but rounding (bool)."""
    return std <= EPSILON * mean.abs().clamp(min=1.0)


def _centered(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Values minus mean, and exactly 0 where the deviation is nothing but rounding."""
    return (values - mean).masked_fill(_is_constant(mean, std), 0.0)
