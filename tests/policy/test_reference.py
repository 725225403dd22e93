"""The KL term to a frozen reference, through the real loop."""

import pytest
import torch

from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.policy.net import PolicyNet
from tests.loop import Recorder, fit, policy, replay_data
from tests.policy.transcripts import alone


@pytest.fixture(scope="module")
def run(model_path, tmp_path_factory):
    seen = Recorder()
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.5))
    trained = fit(tmp_path_factory.mktemp("run"), module, replay_data(), extra=(seen,))
    return module, trained, seen


def test_kl_to_the_reference_starts_at_zero_and_grows_as_the_policy_moves(run):
    _, _, seen = run
    kl = [float(values.mean()) for values in seen.metric("kl_reference")]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-6


def test_the_reference_keeps_its_weights_and_has_no_gradient(run):
    module, _, _ = run
    fresh = PolicyNet.from_pretrained(module.path)
    for kept, original in zip(module.reference.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(kept, original)
        assert kept.grad is None
        assert not kept.requires_grad


def test_the_checkpoint_leaves_the_reference_out_and_a_resumed_run_has_it_again(run, model_path, tmp_path):
    _, trained, _ = run
    path = trained.checkpoint_callback.last_model_path
    assert not [key for key in torch.load(path, weights_only=True)["state_dict"] if key.startswith("reference.")]
    seen = Recorder()
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.5))
    fit(tmp_path / "more", module, replay_data(), ckpt_path=path, iterations=3, extra=(seen,))
    assert float(seen.metric("kl_reference")[0].mean()) > 1e-6


def test_a_divergence_in_the_reward_is_taken_off_at_collection_and_costs_no_update_anything(model_path, tmp_path):
    seen, data = Recorder(), replay_data()
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.5, kl_in="reward", kl_estimator="k1"))
    fit(tmp_path, module, data, extra=(seen,))
    reference = PolicyNet.from_pretrained(module.path)
    items = data.buffer.get(data.buffer.ids())
    divergences = torch.tensor(
        [float((item.behavior_log_probs - alone(reference, item)[0].float()).sum()) for item in items]
    )
    outcomes = torch.tensor([item.training_return for item in items])
    returns = outcomes - 0.5 * divergences
    for start in range(0, len(items), 4):
        group, plain = returns[start : start + 4], outcomes[start : start + 4]
        assert plain.std(correction=0) > 0
        for item, mine in zip(items[start : start + 4], group, strict=True):
            assert item.group_mean == pytest.approx(float(plain.mean()), abs=1e-4)
            expected = (mine - group.mean()) / plain.std(correction=0)
            assert float(item.advantages[0]) == pytest.approx(float(expected), abs=1e-3)
    assert divergences[:8].abs().max() < 1e-3, "the first iteration samples from the reference"
    assert divergences[8:].abs().max() > 1e-2
    assert not any("kl_reference" in observation.token_metrics for observation in seen.observations)
    (_, first), (_, second) = read_scalars(tmp_path / "run")["rollout/kl_reference"]
    assert first == pytest.approx(0.0, abs=1e-4)
    tokens = sum(item.num_sampled for item in items[8:])
    assert second == pytest.approx(float(divergences[8:].sum()) / tokens, rel=1e-3)
