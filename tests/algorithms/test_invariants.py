"""What every loss must satisfy, whatever it is; see ``menu`` for how a new one gets here."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freshper_lightning.algorithms import PPO, SFT, LossInputs, Reinforce, ValueInputs
from freshper_lightning.trajectory import Trajectory
from tests.algorithms.episodes import alone, episode
from tests.algorithms.menu import (
    CRITIC,
    MENU,
    POLICIES,
    built,
    double,
    gradient,
    name_of,
    part_of,
    random_inputs,
    subclasses,
)

every_loss = pytest.mark.parametrize("algorithm", MENU, ids=name_of)
every_policy_loss = pytest.mark.parametrize("algorithm", POLICIES, ids=name_of)
LENGTHS = [3, 1, 4, 2]


def unmoved(seed: int) -> LossInputs:
    """All policies are one and the same."""
    inputs = random_inputs(LENGTHS, seed, drift=0.0)
    assert torch.equal(inputs.behavior_log_probs, inputs.log_probs.detach())
    return inputs


def test_every_class_and_every_choice_is_in_the_menu():
    assert {type(algorithm) for algorithm in MENU} == set(subclasses(Reinforce)) | {SFT}
    assert {"bypass", "decoupled", "importance_sampling"} == {algorithm.correction for algorithm in POLICIES}
    assert len(MENU) == len(set(MENU)) > 70


@every_policy_loss
def test_an_unchanged_policy_has_ratio_one_nothing_clipped_and_no_divergence(algorithm):
    metrics = algorithm.loss(unmoved(0)).token_metrics
    assert metrics["ratio"].eq(1).all()
    assert "weight" not in metrics or metrics["weight"].eq(1).all()
    for name in ("log_ratio", "clipped", "kl_behavior", "kl_reference"):
        assert not metrics[name].any(), name


@every_policy_loss
def test_an_unchanged_policy_gives_the_plain_policy_gradient(algorithm):
    inputs = unmoved(1)
    expected = -inputs.coefficients * inputs.importance_weights * inputs.advantages
    torch.testing.assert_close(gradient(algorithm, inputs), expected)


def of_a_critic_that_knows_nothing(algorithm: PPO, collected: list[Trajectory]) -> Tensor:
    """Advantages where all values are 0 and nothing is discounted: those of the outcomes."""
    rewards = torch.cat([trajectory.token_rewards() for trajectory in collected])
    segments = torch.arange(len(collected)).repeat_interleave(torch.tensor([t.num_sampled for t in collected]))
    behavior = torch.cat([trajectory.behavior_log_probs for trajectory in collected])
    inputs = ValueInputs(rewards, torch.zeros_like(rewards), segments, behavior, behavior, behavior)
    return algorithm.normalized(algorithm.estimates(inputs).advantages, alone).double()


@every_policy_loss
def test_equal_rewards_give_no_gradient(algorithm):
    algorithm = dataclasses.replace(
        algorithm,
        group_filter=None,
        entropy_coefficient=0.0,
        **{"kl_in": "loss", "kl_estimator": "k3", "kl_ratio": True, "kl_coefficient": 0.0},
    )
    collected = algorithm.advantages([episode(0, member, 0.7, (3,)) for member in range(3)], alone)
    centered = algorithm.baseline != "none" or algorithm.whiten
    if isinstance(algorithm, PPO):
        advantages = of_a_critic_that_knows_nothing(dataclasses.replace(algorithm, gae_lambda=1.0), collected)
    else:
        advantages = torch.cat([trajectory.token_advantages() for trajectory in collected]).double()
    inputs = random_inputs([3, 3, 3], seed=2, advantages=advantages if centered else torch.zeros(9).double())
    assert gradient(algorithm, inputs).tolist() == [0.0] * 9


@every_loss
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_gradient_does_not_depend_on_split_ranks_or_order(algorithm, data):
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    inputs = random_inputs(lengths, seed=sum(lengths))
    trained = (inputs.log_probs, inputs.values) if algorithm.needs_critic() else (inputs.log_probs,)
    totals = (float(sum(lengths)), float(len(lengths)))

    def accumulate(batches: list[list[int]], scale: float) -> Tensor:
        for leaf in trained:
            leaf.grad = None
        for conversations in batches:
            part = part_of(inputs, conversations)
            part.coefficients = algorithm.coefficients(part.segments, part.lengths, *totals).double()
            (algorithm.loss(part).loss * scale).backward()
        return torch.cat([leaf.grad for leaf in trained])

    whole = accumulate([list(range(len(lengths)))], 1.0)
    # Four micro-batches, two on each of two ranks: each is scaled by 2 x 2, then all gradients are averaged.
    pieces = [[index for index in order if parts[index] == part] for part in range(4)]
    split = accumulate(pieces, 4.0) / 4.0
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-9)


@every_loss
def test_a_conversation_of_coefficient_zero_has_no_gradient_and_touches_no_other(algorithm):
    inputs = random_inputs(LENGTHS, seed=3)
    outside = inputs.segments != 2
    before = gradient(algorithm, inputs)[outside].clone()
    inputs.coefficients[~outside] = 0.0
    inputs.log_probs.data[~outside] = double(-300.0, 300.0, -1.0, -50.0)
    inputs.values.data[~outside] = double(-300.0, 300.0, -1.0, -50.0)
    slopes = gradient(algorithm, inputs)
    assert slopes[~outside].tolist() == [0.0] * 4
    torch.testing.assert_close(slopes[outside], before)
    assert slopes.any()


@every_policy_loss
@pytest.mark.parametrize("distance", [1e4, 300.0, 25.0])
def test_policies_far_apart_give_finite_numbers(algorithm, distance):
    inputs = random_inputs(LENGTHS, seed=4)
    inputs.log_probs.data += distance * torch.linspace(-1, 1, 10).double()
    output = algorithm.loss(inputs)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(gradient(algorithm, inputs)).all()
    assert torch.isfinite(inputs.entropy.grad).all() if inputs.entropy.grad is not None else True


@every_loss
def test_weights_and_everything_stored_are_constants(algorithm):
    """Nothing but the current policy's own numbers gets a gradient, and each token of it one gradient."""
    inputs = random_inputs(LENGTHS, seed=5)
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    others = ("log_probs", "entropy", "values", "segments", "lengths")
    stored = {name: tensor for name, tensor in fields.items() if name not in others}
    for tensor in stored.values():
        tensor.requires_grad_()
    slopes = gradient(algorithm, inputs)
    assert [name for name, tensor in stored.items() if tensor.grad is not None] == []
    # Twice the importance weight of one token is twice the gradient of that token and of no other.
    inputs.importance_weights.data[4] *= 2
    expected = slopes.clone()
    expected[4] *= 2
    torch.testing.assert_close(gradient(algorithm, inputs), expected)


@every_policy_loss
def test_metrics_are_reported_without_weights_and_without_gradient(algorithm):
    inputs = random_inputs(LENGTHS, seed=6)
    metrics = algorithm.loss(inputs).token_metrics
    assert all(values.dtype == torch.float32 and not values.requires_grad for values in metrics.values())
    assert all(values.shape == (10,) for values in metrics.values())
    weightless = dataclasses.replace(
        inputs, importance_weights=0 * inputs.advantages, coefficients=0 * inputs.advantages
    )
    again = algorithm.loss(weightless).token_metrics
    assert metrics.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in metrics.items())
    assert set(metrics["clipped"].tolist()) <= {0.0, 1.0}


@every_loss
def test_a_skipped_update_has_a_loss_of_zero_with_a_graph(algorithm):
    inputs = random_inputs([5], seed=7)
    inputs.coefficients = algorithm.coefficients(inputs.segments, inputs.lengths, 0.0, 0.0).double()
    inputs.importance_weights = torch.zeros(5, dtype=torch.float64)
    assert algorithm.loss(inputs).loss.item() == 0.0
    assert gradient(algorithm, inputs).tolist() == [0.0] * 5


@every_loss
def test_a_micro_batch_without_tokens_has_a_loss_of_zero_with_a_graph(algorithm):
    inputs = random_inputs([], seed=0)
    assert algorithm.loss(inputs).loss.item() == 0.0
    assert gradient(algorithm, inputs).shape == (0,)


@every_policy_loss
def test_what_the_loss_asks_for_is_what_it_needs(algorithm):
    inputs = random_inputs(LENGTHS, seed=8)
    needed = {
        "proximal_log_probs": algorithm.needs_proximal(),
        "reference_log_probs": algorithm.needs_reference(),
        "entropy": algorithm.needs_entropy(),
        **dict.fromkeys(CRITIC, algorithm.needs_critic()),
    }
    algorithm.loss(dataclasses.replace(inputs, **{name: None for name, needs in needed.items() if not needs}))
    for name in (name for name, needs in needed.items() if needs):
        with pytest.raises(ValueError, match=f"the inputs have no {name}"):
            algorithm.loss(dataclasses.replace(inputs, **{name: None}))


@pytest.mark.parametrize(
    "cls", [cls for cls in subclasses(Reinforce) if not built(cls).needs_critic()], ids=lambda cls: cls.__name__
)
def test_a_preset_is_nothing_but_settings(cls):
    preset = built(cls)
    plain = Reinforce(**{field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)})
    inputs = random_inputs(LENGTHS, seed=9)
    assert torch.equal(gradient(preset, inputs).clone(), gradient(plain, inputs))
    assert [field.name for field in dataclasses.fields(preset)] == list(Reinforce.__dataclass_fields__)
