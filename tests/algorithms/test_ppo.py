"""PPO's settings, what it makes of rewards, and its loss on three tokens."""

import dataclasses

import pytest
import torch

from freshper_lightning.algorithms import PPO, Reinforce, ValueInputs
from tests.algorithms.episodes import alone, episode
from tests.algorithms.menu import double, random_inputs, three_tokens


def inputs_of(*trajectories, values=None, **fields) -> ValueInputs:
    rewards = torch.cat([item.token_rewards() for item in trajectories])
    lengths = torch.tensor([item.num_sampled for item in trajectories])
    behavior = torch.cat([item.behavior_log_probs for item in trajectories])
    values = torch.zeros_like(rewards) if values is None else values
    return ValueInputs(rewards, values, torch.arange(len(lengths)).repeat_interleave(lengths), behavior, **fields)


def test_rewards_are_at_the_last_token_of_their_turn_and_the_penalty_at_the_end():
    item = dataclasses.replace(episode(0, 0, 1.0, (2, 1, 3), penalty=-0.25), rewards=torch.tensor([0.5, 0.25, 1.0]))
    assert item.token_rewards().tolist() == [0, 0.5, 0.25, 0, 0, 0.75]
    assert float(item.token_rewards().sum()) == item.training_return


def test_observations_between_turns_are_no_steps():
    """A turn's end is followed by the next turn's first token, however many tokens the environment said."""
    found = PPO(gamma=0.5, gae_lambda=1.0).estimates(inputs_of(episode(0, 0, 1.0, (2, 2))))
    assert found.returns.tolist() == [0.125, 0.25, 0.5, 1.0]


def test_a_truncated_episode_is_not_bootstrapped():
    ended = episode(0, 0, 0.5, (3,))
    values = torch.tensor([0.25, 0.5, 0.75])
    found = [
        PPO().estimates(inputs_of(item, values=values)) for item in (ended, dataclasses.replace(ended, truncated=True))
    ]
    assert torch.equal(found[0].returns, found[1].returns)
    assert float(found[1].td_errors[-1]) == 0.5 - 0.75


def test_collection_stores_no_advantages_but_the_statistics_of_groups():
    collected = PPO().advantages([episode(0, member, float(member), (2,)) for member in range(2)], alone)
    assert [item.advantages for item in collected] == [None, None]
    assert [(item.group_mean, item.group_std) for item in collected] == [(0.5, 0.5)] * 2
    alike = [episode(1, member, 1.0, (2,)) for member in range(2)]
    assert PPO(group_filter=0.0).advantages(alike, alone) == []
    with pytest.raises(ValueError, match="holds a member twice"):
        PPO().advantages([episode(0, 0, 1.0), episode(0, 0, 1.0)], alone)


def test_k1_in_the_reward_is_taken_off_token_by_token():
    algorithm = PPO(kl_coefficient=0.5, kl_in="reward", kl_estimator="k1", gae_lambda=1.0)
    assert (algorithm.needs_reference(), algorithm.needs_reference_at_collection()) == (True, False)
    item = episode(0, 0, 1.0, (3,))
    reference = item.behavior_log_probs - torch.tensor([1.0, 0.0, -2.0])
    found = algorithm.estimates(inputs_of(item, reference_log_probs=reference))
    assert found.td_errors.tolist() == [-0.5, 0.0, 2.0]
    assert found.returns.tolist() == [1.5, 2.0, 2.0]
    with pytest.raises(ValueError, match="the inputs have no reference_log_probs"):
        algorithm.estimates(inputs_of(item))
    inputs = random_inputs([3], seed=0)
    metrics = algorithm.loss(inputs).token_metrics
    expected = inputs.behavior_log_probs - inputs.reference_log_probs
    torch.testing.assert_close(metrics["kl_reward"], expected.float())
    without = PPO(gae_lambda=1.0).loss(inputs)
    assert torch.equal(algorithm.loss(inputs).loss, without.loss), "the divergence is in the reward and nowhere else"


def test_vtrace_weighs_by_current_over_behavior():
    item = episode(0, 0, 1.0, (2,))
    current = item.behavior_log_probs + torch.tensor([0.0, 0.5]).log()
    algorithm = PPO(estimator="vtrace", gae_lambda=1.0)
    assert algorithm.estimates(inputs_of(item, log_probs=current)).returns[1] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="the inputs have no log_probs"):
        algorithm.estimates(inputs_of(item))


def test_advantages_are_whitened_over_all_ranks_and_clipped_last():
    other = torch.tensor([5.0, 7.0], dtype=torch.float64)
    mine = torch.tensor([1.0, 3.0])
    both = torch.cat([mine.double(), other])
    sums = iter([torch.tensor([2.0, 12.0]), ((other - both.mean()) ** 2).sum()])
    found = PPO().normalized(mine, lambda tensor: tensor + next(sums))
    torch.testing.assert_close(found.double(), (mine.double() - 4) / both.std(correction=0), rtol=1e-5, atol=0)
    assert PPO(advantage_clip=0.5).normalized(mine, alone).tolist() == [-0.5, 0.5]
    assert PPO(whiten=False).normalized(mine, alone).tolist() == [1.0, 3.0]
    assert PPO().normalized(mine[:0], alone).tolist() == []


def critical(**fields):
    tensors = {"values": double(1, 0, 3).requires_grad_(), "old_values": double(0, 0, 0), "td_errors": double(1, -2, 3)}
    return three_tokens(None, **(tensors | {"returns": double(2, 1, 0)} | fields))


def test_the_loss_of_three_tokens_is_the_policys_plus_the_critics():
    output = PPO(value_clip=0.5, value_coefficient=0.25).loss(critical())
    policy = -(1.2 - 2.0 - 0.8) / 3
    assert float(output.loss.detach()) == pytest.approx(policy + 0.25 * (1.125 + 0.5 + 4.5) / 3)
    metrics = output.token_metrics
    assert metrics["value_loss"].tolist() == [1.125, 0.5, 4.5]
    assert metrics["value_clipped"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["td_error"].tolist() == [1.0, 2.0, 3.0]
    assert (metrics["value"].tolist(), metrics["return"].tolist()) == ([1.0, 0.0, 3.0], [2.0, 1.0, 0.0])


def test_the_policy_term_is_that_of_reinforce_and_the_weight_of_the_draw_multiplies_both():
    inputs = critical(importance_weights=double(1, 0.5, 0.25))
    PPO(value_coefficient=1.0).loss(inputs).loss.backward()
    plain = critical(importance_weights=double(1, 0.5, 0.25))
    Reinforce().loss(plain).loss.backward()
    assert torch.equal(inputs.log_probs.grad, plain.log_probs.grad)
    torch.testing.assert_close(inputs.values.grad, double(-1, -0.5, 0.75) / 3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"estimator": "td"}, "estimator must be one of gae, vtrace, not 'td'"),
        ({"gamma": 0.0}, "gamma must be above 0 and at most 1, not 0.0"),
        ({"gae_lambda": 1.5}, "gae_lambda must be at least 0 and at most 1, not 1.5"),
        ({"rho_bar": 2.0}, "rho_bar is 2.0, but estimator 'gae' allows only 1.0"),
        ({"c_bar": 0.5}, "c_bar is 0.5, but estimator 'gae' allows only 1.0"),
        ({"estimator": "vtrace", "c_bar": 2.0}, "c_bar must be above 0 and at most 1, not 2.0"),
        ({"value_coefficient": 0.0}, "value_coefficient must be above 0 and finite, not 0.0"),
        ({"value_clip": 0.0}, "value_clip must be above 0 and finite, not 0.0"),
        ({"baseline": "mean"}, "baseline must be none where a critic is the baseline, not 'mean'"),
        ({"clip": 2.0}, "clip must be above 0 and at most 1, not 2.0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=message):
        PPO(**setting)
