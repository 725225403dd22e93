"""Each loss on three tokens, with numbers worked out by hand, and each term against autograd or finite differences.

The example: conversation 0 has two tokens with ratios 2 and 1 (product 2, geometric mean sqrt 2) and advantages 1 and
-2; conversation 1 has one token with ratio 1/2 and advantage -1. Log-probs are -1, -2 and -1/2.
"""

import dataclasses
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from freshper_lightning.algorithms import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    M2PO,
    MIS,
    SFT,
    TIS,
    TOPR,
    DecoupledGRPO,
    DrGRPO,
    LossInputs,
    Reinforce,
)
from tests.algorithms.episodes import alone, episode
from tests.algorithms.menu import double, gradient, random_inputs, three_tokens

SQRT2, LOG2 = math.sqrt(2), math.log(2)
IS = "importance_sampling"


@dataclass
class Worked:
    """Surrogate and its slope by log-prob of each token, and where a bound or mask acted."""

    algorithm: Reinforce
    surrogate: tuple[float, float, float]
    slope: tuple[float, float, float]
    clipped: tuple[float, float, float]
    loss: float | None = None
    """Where the aggregation is not the token mean."""
    changes: dict[str, Tensor] = field(default_factory=dict)


# Proximal / behavior is 1.6, 2 and 1/2, so that current / proximal is 1.25, 1/2 and 1.
PROXIMAL = {"proximal_log_probs": double(-1.0, -2.0, -0.5) - double(1.25, 0.5, 1.0).log()}
# Ratios 1.25, 4 and 1/2 with advantages 1, -1 and -1.
STEEP = {
    "behavior_log_probs": double(-1.0, -2.0, -0.5) - double(1.25, 4.0, 0.5).log(),
    "advantages": double(1.0, -1.0, -1.0),
}

WORKED = {
    # min(2, 1.2) x 1; 1 x -2; min(0.5 x -1, 0.8 x -1).
    "clip": Worked(Reinforce(), (1.2, -2.0, -0.8), (0, -2, 0), (1, 0, 1)),
    # Inside [0.4, 2.5] nothing is clipped, and the slope of rho A is rho A.
    "clip wide": Worked(Reinforce(clip=0.6, clip_high=1.5), (2.0, -2.0, -0.5), (2, -2, -0.5), (0, 0, 0)),
    "clip steep": Worked(Reinforce(), (1.2, -4.0, -0.8), (0, -4, 0), (1, 0, 1), changes=STEEP),
    "DAPO": Worked(DAPO(), (1.25, -4.0, -0.8), (1.25, -4, 0), (0, 0, 1), changes=STEEP),
    "dual clip": Worked(Reinforce(dual_clip=3.0), (1.2, -3.0, -0.8), (0, 0, 0), (1, 1, 1), changes=STEEP),
    # Both tokens of conversation 0 have its ratio 2: clipped where A > 0, and 2 x -2 where A < 0.
    "sequence clip": Worked(Reinforce(level="sequence"), (1.2, -4.0, -0.8), (0, -4, 0), (1, 0, 1)),
    "geometric clip": Worked(Reinforce(level="geometric"), (1.2, -2 * SQRT2, -0.8), (0, -2 * SQRT2, 0), (1, 0, 1)),
    # Bounds 0.9997 and 1.0004; mean over the two sequences of their token means.
    "GSPO": Worked(
        GSPO(),
        (1.0004, -2 * SQRT2, -0.9997),
        (0, -2 * SQRT2, 0),
        (1, 0, 1),
        loss=-((1.0004 - 2 * SQRT2) / 2 + -0.9997) / 2,
    ),
    # Weights 1.2, 1 and 0.8, times A log pi: 1.2 x -1, -2 x -2, 0.8 x 0.5. Every token keeps its gradient.
    "cispo": Worked(Reinforce(surrogate="cispo"), (-1.2, 4.0, 0.4), (1.2, -2, -0.8), (1, 0, 1)),
    # Only from above, at 5: weights 2, 1 and 1/2.
    "CISPO": Worked(CISPO(), (-2.0, 4.0, 0.25), (2, -2, -0.5), (0, 0, 0)),
    "cispo geometric": Worked(
        Reinforce(surrogate="cispo", level="geometric", clip_high=1.0),
        (-SQRT2, 4 * SQRT2, 0.4),
        (SQRT2, -2 * SQRT2, -0.8),
        (0, 0, 1),
    ),
    # Token 0 (A > 0, ratio > 1) and token 2 (A < 0, ratio < 1) move away from 1; log(2)**2 = 0.48 > 0.04 for each.
    "M2PO": Worked(M2PO(), (0.0, -2.0, 0.0), (0, -2, 0), (1, 0, 1)),
    "second moment wide": Worked(
        Reinforce(surrogate="second_moment", second_moment=0.5), (2.0, -2.0, -0.5), (2, -2, -0.5), (0, 0, 0)
    ),
    # Weights min(2, 1.5), 1 and 1/2, times A log pi: 1.5 x -1, 1 x 4, 0.5 x 0.5.
    "TIS": Worked(TIS(weight_cap=1.5), (-1.5, 4.0, 0.25), (1.5, -2, -0.5), (1, 0, 0)),
    # Only the weight 1 is inside [0.8, 1.5].
    "masked token weights": Worked(
        TIS(weight_bound="mask", weight_floor=0.8, weight_cap=1.5), (0.0, 4.0, 0.0), (0, -2, 0), (1, 0, 1)
    ),
    # Weights min(2, 1.5) for conversation 0 and 1/2 for conversation 1.
    "TIS of sequences": Worked(
        TIS(weight_level="sequence", weight_cap=1.5), (-1.5, 6.0, 0.25), (1.5, -3, -0.5), (1, 1, 0)
    ),
    # Conversation 0 weighs 2, beyond 1.5, and is left out; conversation 1 weighs 1/2.
    "MIS": Worked(MIS(weight_cap=1.5), (0.0, 0.0, 0.25), (0, 0, -0.5), (1, 1, 0)),
    "geometric mask": Worked(
        MIS(weight_level="geometric", weight_floor=0.9, weight_cap=1.5),
        (-SQRT2, 4 * SQRT2, 0.0),
        (SQRT2, -2 * SQRT2, 0),
        (0, 0, 1),
    ),
    # A > 0 weighs 1; below that conversation 0 weighs min(2, 1) and conversation 1 weighs 1/2. Mean of token sums.
    "TOPR": Worked(TOPR(), (-1.0, 4.0, 0.25), (1, -2, -0.5), (0, 1, 0), loss=-((-1.0 + 4.0) + 0.25) / 2),
    # Weights min(1.6, 1.8), min(2, 1.8) and 1/2 times PPO's clip of 1.25, 1/2 and 1: 1.2 x 1, 0.8 x -2, 1 x -1.
    "DecoupledGRPO": Worked(
        DecoupledGRPO(weight_cap=1.8), (1.92, -2.88, -0.5), (0, 0, -0.5), (1, 1, 0), changes=PROXIMAL
    ),
    # Proximal / behavior of conversation 0 is 1.6 x 2 = 3.2, capped at 3; current / proximal is 1.25 x 1/2 = 0.625.
    "decoupled sequences": Worked(
        DecoupledGRPO(level="sequence", weight_level="sequence", weight_cap=3.0),
        (3 * 0.625, 3 * 0.8 * -2, -0.5),
        (3 * 0.625, 0, -0.5),
        (1, 1, 0),
        changes=PROXIMAL,
    ),
    # The mean of log(behavior / current) is -log(2) / 2 in conversation 0 and log 2 = 0.69 in conversation 1.
    "negative mask": Worked(Reinforce(negative_mask=0.5), (1.2, -2.0, 0.0), (0, -2, 0), (1, 0, 1)),
    "negative mask with TIS": Worked(TIS(negative_mask=0.5), (-2.0, 4.0, 0.0), (2, -2, 0), (0, 0, 1)),
    "mild negative mask": Worked(TIS(negative_mask=0.7), (-2.0, 4.0, 0.25), (2, -2, -0.5), (0, 0, 0)),
    # Token sums 1.2 - 2 and -0.8 over a length of 4, then the mean of two.
    "DrGRPO": Worked(
        DrGRPO(aggregation_length=4.0), (1.2, -2.0, -0.8), (0, -2, 0), (1, 0, 1), loss=-((1.2 - 2.0) - 0.8) / 4 / 2
    ),
}


@pytest.mark.parametrize("name", WORKED)
def test_each_loss_on_three_tokens(name):
    worked = WORKED[name]
    inputs = three_tokens(worked.algorithm, **worked.changes)
    output = worked.algorithm.loss(inputs)
    torch.testing.assert_close(output.token_metrics["surrogate"], torch.tensor(worked.surrogate), atol=1e-6, rtol=1e-6)
    assert output.token_metrics["clipped"].tolist() == list(worked.clipped)
    expected = -sum(worked.surrogate) / 3 if worked.loss is None else worked.loss
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient(worked.algorithm, inputs), -inputs.coefficients * double(*worked.slope))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", -(1.2 - 2.0 - 0.8) / 3),
        ("sequence_mean", -((1.2 - 2.0) / 2 + (-0.8) / 1) / 2),
        ("sequence_sum", -((1.2 - 2.0) + (-0.8)) / 2),
    ],
)
def test_each_aggregation_on_three_tokens(aggregation, expected):
    algorithm = Reinforce(aggregation=aggregation)
    assert algorithm.loss(three_tokens(algorithm)).loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1.0 + 2.0 + 0.5) / 3),
        ("sequence_mean", ((1.0 + 2.0) / 2 + 0.5 / 1) / 2),
        ("sequence_sum", ((1.0 + 2.0) + 0.5) / 2),
    ],
)
def test_supervised_loss_of_three_tokens(aggregation, expected):
    algorithm = SFT(aggregation=aggregation)
    missing = {"behavior_log_probs": double(*[math.nan] * 3)}
    inputs = three_tokens(algorithm, entropy=double(0.1, 0.2, 0.3), **missing)
    output = algorithm.loss(inputs)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert set(output.token_metrics) == {"surrogate", "entropy"}
    torch.testing.assert_close(gradient(algorithm, inputs), -inputs.coefficients)
    assert set(SFT().loss(three_tokens()).token_metrics) == {"surrogate"}


# Reference / current is 2, 1 and 1/2.
REFERENCE = {"reference_log_probs": double(-1.0 + LOG2, -2.0, -0.5 - LOG2)}


@pytest.mark.parametrize(
    ("settings_of_kl", "values", "slopes"),
    [
        # k3 = r - 1 - log r of r = 2, 1, 1/2; its slope by log pi is 1 - r.
        ({"kl_ratio": False}, (1 - LOG2, 0, LOG2 - 0.5), (-1, 0, 0.5)),
        # Times rho = 2, 1, 1/2; the slope is rho x (k3 + 1 - r).
        ({}, (2 * (1 - LOG2), 0, 0.5 * (LOG2 - 0.5)), (2 * (1 - LOG2 - 1), 0, 0.5 * (LOG2 - 0.5 + 0.5))),
        # k2 = log(r)**2 / 2, with slope -log r.
        ({"kl_estimator": "k2", "kl_ratio": False}, (LOG2**2 / 2, 0, LOG2**2 / 2), (-LOG2, 0, LOG2)),
        # Times rho as a constant.
        ({"kl_estimator": "k2"}, (LOG2**2, 0, LOG2**2 / 4), (-2 * LOG2, 0, 0.5 * LOG2)),
    ],
)
def test_each_divergence_on_three_tokens(settings_of_kl, values, slopes):
    algorithm = Reinforce(kl_coefficient=0.5, **settings_of_kl)
    inputs = three_tokens(advantages=double(0.0, 0.0, 0.0), **REFERENCE)
    output = algorithm.loss(inputs)
    assert output.loss.item() == pytest.approx(0.5 * sum(values) / 3, rel=1e-6)
    torch.testing.assert_close(gradient(algorithm, inputs), 0.5 * double(*slopes) / 3)
    torch.testing.assert_close(output.token_metrics["kl_reference"], torch.tensor([1 - LOG2, 0.0, LOG2 - 0.5]))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_divergence_on_stale_samples_has_the_gradient_of_the_true_one_in_expectation(estimator):
    """Every token of a small vocabulary, weighted by the behavior policy, is an exact expectation."""
    generator = torch.Generator().manual_seed(0)
    logits, behavior, reference = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    behavior, reference = behavior.log_softmax(-1), reference.log_softmax(-1)

    def slope(expression: Tensor) -> Tensor:
        return torch.autograd.grad(expression, logits, retain_graph=True)[0]

    current = logits.log_softmax(-1)
    expected = slope((current.exp() * (current - reference)).sum())
    inputs = LossInputs(
        current,
        behavior,
        torch.zeros(6),
        behavior.exp(),
        torch.ones(6),
        segments=torch.zeros(6, dtype=torch.int64),
        lengths=torch.tensor([6]),
        reference_log_probs=reference,
    )
    with_ratio = Reinforce(kl_coefficient=1.0, kl_estimator=estimator).loss(inputs).loss
    torch.testing.assert_close(slope(with_ratio), expected)
    without = Reinforce(kl_coefficient=1.0, kl_estimator=estimator, kl_ratio=False).loss(inputs).loss
    assert (slope(without) - expected).abs().max() > 0.01


def test_importance_weights_multiply_policy_loss_entropy_and_divergence_alike():
    # Per token: -surrogate - 0.1 entropy + 0.5 k3.
    weights = (0.5, 1.0, 0.25)
    inputs = three_tokens(importance_weights=double(*weights), entropy=double(0.5, 1.0, 2.0), **REFERENCE)
    token_losses = (
        -1.2 - 0.1 * 0.5 + 0.5 * (1 - LOG2),
        +2.0 - 0.1 * 1.0,
        +0.8 - 0.1 * 2.0 + 0.5 * (LOG2 - 0.5),
    )
    expected = sum(weight * loss / 3 for weight, loss in zip(weights, token_losses, strict=True))
    algorithm = Reinforce(entropy_coefficient=0.1, kl_coefficient=0.5, kl_ratio=False)
    assert algorithm.loss(inputs).loss.item() == pytest.approx(expected, rel=1e-6)


def test_reference_and_entropy_are_measured_even_where_they_cost_nothing():
    inputs = random_inputs([4], seed=0)
    metrics = Reinforce().loss(inputs).token_metrics
    torch.testing.assert_close(metrics["entropy"], inputs.entropy.detach().float())
    assert (metrics["kl_reference"] >= 0).all()
    assert inputs.entropy.grad is None


def test_weights_are_reported_where_the_correction_has_them():
    assert "weight" not in Reinforce().loss(three_tokens()).token_metrics
    torch.testing.assert_close(TIS().loss(three_tokens()).token_metrics["weight"], torch.tensor([2.0, 1.0, 0.5]))
    metrics = DecoupledGRPO().loss(three_tokens(**PROXIMAL)).token_metrics
    torch.testing.assert_close(metrics["weight"], torch.tensor([1.6, 2.0, 0.5]))
    torch.testing.assert_close(metrics["ratio"], torch.tensor([1.25, 0.5, 1.0]))
    torch.testing.assert_close(metrics["log_ratio"], torch.tensor([2.0, 1.0, 0.5]).log())


def test_log_ratio_is_reported_beyond_the_bound_of_the_ratio():
    inputs = three_tokens(behavior_log_probs=double(-40.0, 48.0, -0.5), advantages=double(-1.0, 1.0, 1.0))
    output = Reinforce().loss(inputs)
    assert output.token_metrics["log_ratio"].tolist() == [39.0, -50.0, 0.0]
    torch.testing.assert_close(output.token_metrics["ratio"], torch.tensor([20.0, -20.0, 0.0]).exp())
    assert torch.isfinite(output.loss)


@pytest.mark.parametrize(
    "algorithm",
    [
        Reinforce(),
        Reinforce(clip=0.1, clip_high=0.3, dual_clip=1.5),
        Reinforce(surrogate="second_moment"),
        Reinforce(entropy_coefficient=0.1, kl_coefficient=0.2),
        Reinforce(kl_coefficient=0.2, kl_estimator="k2", kl_ratio=False),
        DecoupledGRPO(kl_coefficient=0.2),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_agrees_with_finite_differences(algorithm, seed):
    """For losses that have no constant which depends on the current policy."""
    inputs = random_inputs([3, 4], seed)
    analytic = gradient(algorithm, inputs)
    frozen = inputs.log_probs.detach()
    for token in range(7):
        step = torch.zeros_like(frozen)
        step[token] = 1e-6
        low, high = (algorithm.loss(dataclasses.replace(inputs, log_probs=frozen + sign * step)) for sign in (-1, 1))
        slope = (high.loss.item() - low.loss.item()) / 2e-6
        assert analytic[token].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("level", "aggregation"), [("geometric", "sequence_mean"), ("sequence", "sequence_sum")])
def test_a_ratio_of_sequences_has_the_gradient_of_the_papers_objective(level, aggregation):
    """Mean over sequences of min(s A, clip(s) A) with s = exp(mean or sum of log-ratios), by autograd of s itself."""
    algorithm = Reinforce(level=level, aggregation=aggregation, clip=0.3)
    lengths = [3, 2, 4, 1]
    inputs = random_inputs(lengths, seed=11, drift=0.2)
    inputs.advantages = double(1.0, -0.5, 2.0, -1.5).repeat_interleave(inputs.lengths)
    inputs.importance_weights = torch.ones(10, dtype=torch.float64)
    inputs.coefficients = algorithm.coefficients(inputs.segments, inputs.lengths, 10.0, 4.0).double()
    ours = gradient(algorithm, inputs).clone()
    pieces = (inputs.log_probs - inputs.behavior_log_probs).split(lengths)
    ratios = torch.stack([(piece.mean() if level == "geometric" else piece.sum()).exp() for piece in pieces])
    advantages = double(1.0, -0.5, 2.0, -1.5)
    objective = torch.minimum(ratios * advantages, ratios.clamp(0.7, 1.3) * advantages).mean()
    (expected,) = torch.autograd.grad(-objective, inputs.log_probs)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    assert 0 < sum(bool(piece.any()) for piece in expected.split(lengths)) <= 4


@pytest.mark.parametrize("kind", ["clip", "cispo", "second_moment"])
def test_decoupled_is_the_weight_times_bypass_against_the_proximal_policy(kind):
    inputs = random_inputs([3, 4], seed=12)
    decoupled = Reinforce(correction="decoupled", surrogate=kind, weight_cap=1.3)
    against_proximal = dataclasses.replace(inputs, behavior_log_probs=inputs.proximal_log_probs)
    weight = (inputs.proximal_log_probs - inputs.behavior_log_probs).exp().clamp(max=1.3)
    ours = gradient(decoupled, inputs).clone()
    torch.testing.assert_close(ours, weight * gradient(Reinforce(surrogate=kind), against_proximal))


def test_decoupled_equals_truncated_importance_sampling_where_the_proximal_policy_is_the_current_one():
    inputs = random_inputs([3, 4], seed=13)
    inputs.proximal_log_probs = inputs.log_probs.detach()
    ours = gradient(DecoupledGRPO(), inputs).clone()
    torch.testing.assert_close(ours, gradient(TIS(), inputs))


def test_corrections_differ_only_where_one_bounds_the_ratio():
    inputs = random_inputs([50], seed=5)
    clip, truncate = Reinforce(clip=0.2), TIS(weight_cap=1.2)
    ratio = clip.loss(inputs).token_metrics["ratio"]
    between = (ratio > 0.8) & (ratio < 1.2)
    # Inside the band rho x grad log pi is the gradient of rho itself.
    first = gradient(clip, inputs)[between].clone()
    torch.testing.assert_close(first, gradient(truncate, inputs)[between])
    assert 0 < between.sum() < 50


def test_entropy_bonus_has_the_gradient_of_its_coefficient():
    inputs = random_inputs([5], seed=1)
    Reinforce(entropy_coefficient=0.3).loss(inputs).loss.backward()
    torch.testing.assert_close(inputs.entropy.grad, -0.3 * inputs.coefficients * inputs.importance_weights)


def test_advantages_follow_the_settings():
    trajectories = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(0, 2, 0.0), episode(0, 3, 0.0)]
    for algorithm, best in (
        (Reinforce(), 3**0.5),
        (Reinforce(whiten=False), 1.0),
        (GRPO(), 3**0.5),
        (GRPO(baseline="mean"), 0.75),
        (GRPO(baseline="leave_one_out"), 1.0),
        (Reinforce(baseline="mean_std", advantage_clip=0.2), 0.2),
    ):
        collected = algorithm.advantages(trajectories, alone)
        assert collected[0].advantages.item() == pytest.approx(best, rel=1e-4), algorithm
        assert collected[0].group_mean == 0.25


def test_a_divergence_in_the_reward_comes_off_the_return_before_the_baseline():
    # Behavior is -0.5 per token; the sums of log(behavior / reference) are 2 x 0.5 = 1 and 3 x -0.1 = -0.3. Returns
    # 1 - 0.1 x 1 = 0.9 and 0 + 0.1 x 0.3 = 0.03 have the mean 0.465.
    trajectories = [episode(0, 0, 1.0, (2,)), episode(0, 1, 0.0, (3,))]
    reference = {0: torch.full((2,), -1.0), 1: torch.full((3,), -0.4)}
    asked = []

    def score(kept):
        asked.append([item.member for item in kept])
        return [reference[item.member] for item in kept]

    algorithm = GRPO(baseline="mean", kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")
    first, second = algorithm.advantages(trajectories, alone, score)
    assert first.advantages.item() == pytest.approx(0.435)
    assert second.advantages.item() == pytest.approx(-0.435)
    assert (first.group_mean, first.group_std) == (0.5, 0.5), "of the outcomes"
    assert asked == [[0, 1]]
    assert not algorithm.needs_reference()
    with pytest.raises(ValueError, match=r"kl_coefficient is 0\.1 in the reward, but there is no reference"):
        algorithm.advantages(trajectories, alone)


def test_demonstrations_all_have_advantage_one():
    collected = SFT().advantages([episode(0, 0, 0.0, (2, 1)), episode(5, 0, 1.0)], alone)
    assert [trajectory.advantages.tolist() for trajectory in collected] == [[1.0, 1.0], [1.0]]


@pytest.mark.parametrize("name", ["advantages", "importance_weights", "reference_log_probs", "segments"])
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must have the shape \[S\] of log_probs, \[3\], not \[3, 1\]"):
        Reinforce().loss(three_tokens(**{name: torch.ones(3, 1)}))
