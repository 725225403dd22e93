import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freshper_lightning.algorithms import GRPO, SFT, Algorithm, LossInputs, Reinforce
from freshper_lightning.algorithms.losses import aggregation_coefficients
from tests.algorithms.episodes import alone, episode

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum"]
ALGORITHMS = [
    Reinforce(),
    Reinforce(clip=0.1, clip_high=0.3, dual_clip=1.5),
    Reinforce(correction="truncate", truncation=1.2),
    Reinforce(entropy_coefficient=0.1, kl_coefficient=0.2),
    Reinforce(correction="truncate", entropy_coefficient=0.1, kl_coefficient=0.2),
    SFT(),
]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def three_tokens(aggregation: str = "token_mean", **changes: Tensor) -> LossInputs:
    """Two tokens of one trajectory and one of another, with ratios 2, 1 and 1/2 and advantages 1, -2 and -1."""
    log_probs = double(-1.0, -2.0, -0.5).requires_grad_()
    values = {
        "log_probs": log_probs,
        "behavior_log_probs": log_probs.detach() - double(2.0, 1.0, 0.5).log(),
        "advantages": double(1.0, -2.0, -1.0),
        "coefficients": aggregation_coefficients(
            aggregation, torch.tensor([0, 0, 1]), torch.tensor([2, 1]), total_tokens=3.0, total_sequences=2.0
        ).double(),
        "importance_weights": double(1.0, 1.0, 1.0),
    }
    return LossInputs(**(values | changes))


def random_inputs(num_tokens: int, seed: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    log_probs = -normal().abs() - 0.1
    return LossInputs(
        log_probs=log_probs.clone().requires_grad_(),
        behavior_log_probs=log_probs + 0.4 * normal(),
        advantages=normal(),
        coefficients=normal().abs(),
        importance_weights=normal().abs(),
        entropy=normal().abs().requires_grad_(),
        reference_log_probs=log_probs + 0.4 * normal(),
    )


def gradient(algorithm: Algorithm, inputs: LossInputs) -> Tensor:
    inputs.log_probs.grad = None
    algorithm.loss(inputs).loss.backward()
    assert inputs.log_probs.grad is not None
    return inputs.log_probs.grad


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Ratios 2, 1, 1/2 with advantages 1, -2, -1 and a clip of 0.2: 1.2 x 1 (clipped), 1 x -2, 0.8 x -1 (clipped).
        ("token_mean", -(1.2 - 2.0 - 0.8) / 3),
        ("sequence_mean", -((1.2 - 2.0) / 2 + (-0.8) / 1) / 2),
        ("sequence_sum", -((1.2 - 2.0) + (-0.8)) / 2),
    ],
)
def test_clipped_loss_of_three_tokens(aggregation, expected):
    output = Reinforce().loss(three_tokens(aggregation))
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.token_metrics["clipped"].tolist() == [1.0, 0.0, 1.0]
    torch.testing.assert_close(output.token_metrics["surrogate"], torch.tensor([1.2, -2.0, -0.8]))


@pytest.mark.parametrize(
    ("settings_of_clip", "surrogate", "clipped"),
    [
        # Ratios 1.25, 4 and 1/2 with advantages 1, -1 and -1.
        ({}, [1.2, -4.0, -0.8], [1.0, 0.0, 1.0]),
        ({"clip_high": 0.28}, [1.25, -4.0, -0.8], [0.0, 0.0, 1.0]),
        ({"dual_clip": 3.0}, [1.2, -3.0, -0.8], [1.0, 1.0, 1.0]),
        ({"clip": 0.6}, [1.25, -4.0, -0.5], [0.0, 0.0, 0.0]),
    ],
)
def test_each_clip_setting_reaches_the_loss(settings_of_clip, surrogate, clipped):
    log_probs = double(-1.0, -2.0, -0.5).requires_grad_()
    behavior = log_probs.detach() - double(1.25, 4.0, 0.5).log()
    inputs = three_tokens(log_probs=log_probs, behavior_log_probs=behavior, advantages=double(1.0, -1.0, -1.0))
    output = Reinforce(**settings_of_clip).loss(inputs)
    torch.testing.assert_close(output.token_metrics["surrogate"], torch.tensor(surrogate))
    assert output.token_metrics["clipped"].tolist() == clipped
    assert output.loss.item() == pytest.approx(-sum(surrogate) / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Weights min(2, 1.5), 1, 1/2 times advantage times log-prob: 1.5 x -1, 1 x -2 x -2, 0.5 x -1 x -0.5.
        ("token_mean", -(-1.5 + 4.0 + 0.25) / 3),
        ("sequence_mean", -((-1.5 + 4.0) / 2 + 0.25 / 1) / 2),
        ("sequence_sum", -((-1.5 + 4.0) + 0.25) / 2),
    ],
)
def test_truncated_loss_of_three_tokens(aggregation, expected):
    inputs = three_tokens(aggregation)
    algorithm = Reinforce(correction="truncate", truncation=1.5)
    output = algorithm.loss(inputs)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.token_metrics["clipped"].tolist() == [1.0, 0.0, 0.0]
    # The weight is a constant: the slope is -coefficient x weight x advantage, with weights 1.5, 1, 0.5.
    torch.testing.assert_close(gradient(algorithm, inputs), -inputs.coefficients * double(1.5, -2.0, -0.5))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1.0 + 2.0 + 0.5) / 3),
        ("sequence_mean", ((1.0 + 2.0) / 2 + 0.5 / 1) / 2),
        ("sequence_sum", ((1.0 + 2.0) + 0.5) / 2),
    ],
)
def test_supervised_loss_of_three_tokens(aggregation, expected):
    inputs = three_tokens(aggregation, behavior_log_probs=double(*[math.nan] * 3), entropy=double(0.1, 0.2, 0.3))
    output = SFT().loss(inputs)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert set(output.token_metrics) == {"surrogate", "entropy"}
    torch.testing.assert_close(gradient(SFT(), inputs), -inputs.coefficients)
    assert set(SFT().loss(three_tokens()).token_metrics) == {"surrogate"}


def test_importance_weights_multiply_policy_loss_entropy_and_divergence_alike():
    # Per token: -surrogate - 0.1 entropy + 0.5 k3, with k3 of log 2, 0 and log 1/2: 2 - 1 - log 2, 0, 1/2 - 1 + log 2.
    weights, log2 = (0.5, 1.0, 0.25), math.log(2)
    inputs = three_tokens(
        importance_weights=double(*weights),
        entropy=double(0.5, 1.0, 2.0),
        reference_log_probs=double(-1.0 + log2, -2.0, -0.5 - log2),
    )
    token_losses = (
        -1.2 - 0.1 * 0.5 + 0.5 * (1 - log2),
        +2.0 - 0.1 * 1.0,
        +0.8 - 0.1 * 2.0 + 0.5 * (log2 - 0.5),
    )
    expected = sum(weight * loss / 3 for weight, loss in zip(weights, token_losses, strict=True))
    output = Reinforce(entropy_coefficient=0.1, kl_coefficient=0.5).loss(inputs)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(output.token_metrics["kl_reference"], torch.tensor([1 - log2, 0.0, log2 - 0.5]))


def test_metrics_are_reported_without_weights_and_without_gradient():
    inputs = three_tokens(importance_weights=double(0.0, 7.0, 0.1), coefficients=double(0.0, 0.0, 0.0))
    metrics = Reinforce().loss(inputs).token_metrics
    assert set(metrics) == {"ratio", "log_ratio", "clipped", "kl_behavior", "surrogate"}
    assert all(values.dtype == torch.float32 and not values.requires_grad for values in metrics.values())
    torch.testing.assert_close(metrics["ratio"], torch.tensor([2.0, 1.0, 0.5]))
    torch.testing.assert_close(metrics["log_ratio"], torch.tensor([2.0, 1.0, 0.5]).log())
    torch.testing.assert_close(metrics["kl_behavior"], torch.tensor([1 - math.log(2), 0.0, math.log(2) - 0.5]))


def test_reference_and_entropy_are_measured_even_where_they_cost_nothing():
    inputs = random_inputs(4, seed=0)
    metrics = Reinforce().loss(inputs).token_metrics
    torch.testing.assert_close(metrics["entropy"], inputs.entropy.detach().float())
    assert (metrics["kl_reference"] >= 0).all()
    assert inputs.entropy.grad is None


def test_log_ratio_is_reported_beyond_the_bound_of_the_ratio():
    log_probs = double(-1.0, -50.0).requires_grad_()
    inputs = LossInputs(log_probs, double(-40.0, -1.0), double(-1.0, 1.0), double(1.0, 1.0), double(1.0, 1.0))
    output = Reinforce().loss(inputs)
    assert output.token_metrics["log_ratio"].tolist() == [39.0, -49.0]
    torch.testing.assert_close(output.token_metrics["ratio"], torch.tensor([20.0, -20.0]).exp())
    assert torch.isfinite(output.loss)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_agrees_with_finite_differences(algorithm, seed):
    inputs = random_inputs(7, seed)
    analytic = gradient(algorithm, inputs)
    frozen = inputs.log_probs.detach()
    weights = (frozen - inputs.behavior_log_probs).exp().clamp(max=getattr(algorithm, "truncation", 1.0))

    def loss(log_probs: Tensor) -> float:
        moved = dataclasses.replace(inputs, log_probs=log_probs)
        if getattr(algorithm, "correction", "clip") == "clip":
            return algorithm.loss(moved).loss.item()
        # The truncated weight counts as a constant, so the difference is taken with the weight held at its value.
        kl_and_entropy = dataclasses.replace(moved, advantages=torch.zeros_like(log_probs))
        policy = -(inputs.coefficients * inputs.importance_weights * weights * inputs.advantages * log_probs).sum()
        return algorithm.loss(kl_and_entropy).loss.item() + policy.item()

    for token in range(7):
        step = torch.zeros_like(frozen)
        step[token] = 1e-6
        slope = (loss(frozen + step) - loss(frozen - step)) / 2e-6
        assert analytic[token].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_entropy_bonus_has_the_gradient_of_its_coefficient():
    inputs = random_inputs(5, seed=1)
    Reinforce(entropy_coefficient=0.3).loss(inputs).loss.backward()
    torch.testing.assert_close(inputs.entropy.grad, -0.3 * inputs.coefficients * inputs.importance_weights)


@pytest.mark.parametrize("correction", ["clip", "truncate"])
def test_an_unchanged_policy_gives_the_plain_policy_gradient(correction):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(5, (6, 1), generator=generator)
    log_probs = logits.log_softmax(-1).gather(1, tokens).squeeze(1)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    ones = torch.ones(6, dtype=torch.float64)
    output = Reinforce(correction=correction, dual_clip=None).loss(
        LossInputs(log_probs, log_probs.detach(), advantages, ones / 6, ones)
    )
    output.loss.backward()
    # d(-A log pi)/d(logits) of a softmax policy is -A (one-hot - pi).
    one_hot = torch.nn.functional.one_hot(tokens.squeeze(1), 5)
    expected = -advantages[:, None] * (one_hot - logits.detach().softmax(-1)) / 6
    torch.testing.assert_close(logits.grad, expected)
    metrics = output.token_metrics
    assert metrics["ratio"].eq(1).all()
    assert not metrics["clipped"].any()
    assert not metrics["kl_behavior"].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_gradient_does_not_depend_on_split_ranks_or_order(algorithm, aggregation, data):
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    inputs = random_inputs(sum(lengths), seed=sum(lengths))
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    totals = (float(sum(lengths)), float(len(lengths)))

    def accumulate(batches: list[list[int]], scale: float) -> Tensor:
        inputs.log_probs.grad = None
        for trajectories in batches:
            part_loss(algorithm, aggregation, inputs, segments, trajectories, totals).mul(scale).backward()
        return inputs.log_probs.grad.clone()

    whole = accumulate([list(range(len(lengths)))], 1.0)
    # Four micro-batches, two on each of two ranks: each is scaled by 2 x 2, then all gradients are averaged.
    pieces = [[index for index in order if parts[index] == part] for part in range(4)]
    split = accumulate(pieces, 4.0) / 4.0
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-9)


def part_loss(algorithm, aggregation, inputs, segments, trajectories, totals) -> Tensor:
    """The loss of some of the trajectories, with totals of all; an empty part is a part."""
    rows = torch.cat(
        [torch.empty(0, dtype=torch.int64), *[(segments == index).nonzero()[:, 0] for index in trajectories]]
    )
    lengths = torch.tensor([int((segments == index).sum()) for index in trajectories], dtype=torch.int64)
    local = torch.arange(len(trajectories)).repeat_interleave(lengths)
    fields = {field.name: getattr(inputs, field.name)[rows] for field in dataclasses.fields(inputs)}
    fields["coefficients"] = aggregation_coefficients(aggregation, local, lengths, *totals).double()
    return algorithm.loss(LossInputs(**fields)).loss


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_skipped_update_has_a_loss_of_zero_with_a_graph(algorithm):
    inputs = random_inputs(5, seed=2)
    inputs.coefficients = aggregation_coefficients(
        "token_mean", torch.zeros(5, dtype=torch.int64), torch.tensor([5]), total_tokens=0.0, total_sequences=0.0
    ).double()
    inputs.importance_weights = torch.zeros(5, dtype=torch.float64)
    output = algorithm.loss(inputs)
    assert output.loss.item() == 0.0
    assert gradient(algorithm, inputs).tolist() == [0.0] * 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_micro_batch_without_tokens_has_a_loss_of_zero_with_a_graph(algorithm):
    inputs = random_inputs(0, seed=0)
    assert algorithm.loss(inputs).loss.item() == 0.0
    assert gradient(algorithm, inputs).shape == (0,)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tokens_with_zero_coefficient_have_zero_gradient(algorithm):
    inputs = random_inputs(6, seed=3)
    inputs.coefficients[2:4] = 0.0
    inputs.log_probs.data[2] = -300.0
    inputs.log_probs.data[3] = 300.0
    slopes = gradient(algorithm, inputs)
    assert torch.isfinite(slopes).all()
    assert slopes[2:4].tolist() == [0.0, 0.0]
    assert slopes.any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_and_coefficients_are_constants(algorithm):
    inputs = random_inputs(4, seed=4)
    inputs.importance_weights.requires_grad_()
    inputs.coefficients.requires_grad_()
    gradient(algorithm, inputs)
    assert inputs.importance_weights.grad is None
    assert inputs.coefficients.grad is None


@pytest.mark.parametrize("correction", ["clip", "truncate"])
def test_equal_rewards_give_no_gradient(correction):
    algorithm = Reinforce(baseline="mean_std", correction=correction)
    collected = algorithm.advantages([episode(0, member, 0.7, (3,)) for member in range(3)], alone)
    log_probs = torch.linspace(-2, -0.1, 9, requires_grad=True)
    inputs = LossInputs(
        log_probs,
        torch.cat([trajectory.behavior_log_probs for trajectory in collected]),
        torch.cat([trajectory.token_advantages() for trajectory in collected]),
        torch.full((9,), 1 / 9),
        torch.ones(9),
    )
    assert gradient(algorithm, inputs).tolist() == [0.0] * 9


def test_the_two_corrections_differ_only_where_one_bounds_the_ratio():
    inputs = random_inputs(50, seed=5)
    clip, truncate = Reinforce(clip=0.2), Reinforce(correction="truncate", truncation=1.2)
    ratio = clip.loss(inputs).token_metrics["ratio"]
    between = (ratio > 0.8) & (ratio < 1.2)
    # Inside the band rho x grad log pi is the gradient of rho itself.
    torch.testing.assert_close(gradient(clip, inputs)[between], gradient(truncate, inputs)[between])
    assert 0 < between.sum() < 50


def test_advantages_follow_the_settings():
    trajectories = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(0, 2, 0.0), episode(0, 3, 0.0)]
    for algorithm, best in (
        (Reinforce(), 3**0.5),
        (Reinforce(whiten=False), 1.0),
        (GRPO(), 3**0.5),
        (GRPO(baseline="mean"), 0.75),
        (Reinforce(baseline="mean_std", advantage_clip=0.2), 0.2),
    ):
        collected = algorithm.advantages(trajectories, alone)
        assert collected[0].advantages.item() == pytest.approx(best, rel=1e-4), algorithm
        assert collected[0].group_mean == 0.25


def test_demonstrations_all_have_advantage_one():
    collected = SFT().advantages([episode(0, 0, 0.0, (2, 1)), episode(5, 0, 1.0)], alone)
    assert [trajectory.advantages.tolist() for trajectory in collected] == [[1.0, 1.0], [1.0]]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Reinforce(entropy_coefficient=0.1), "entropy_coefficient is 0.1, but the inputs have no entropy"),
        (Reinforce(kl_coefficient=0.2), "kl_coefficient is 0.2, but the inputs have no reference_log_probs"),
    ],
)
def test_a_term_whose_input_is_missing_is_refused(algorithm, message):
    with pytest.raises(ValueError, match=message):
        algorithm.loss(three_tokens())


@pytest.mark.parametrize("name", ["advantages", "importance_weights", "reference_log_probs"])
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must have the shape \[S\] of log_probs, \[3\], not \[3, 1\]"):
        Reinforce().loss(three_tokens(**{name: torch.ones(3, 1)}))
