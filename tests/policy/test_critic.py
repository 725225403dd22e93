"""The value head: what it reads, what it leaves alone, and where it is kept."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.algorithms import PPO
from freshper_lightning.commands import export
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.export import export_policy
from freshper_lightning.policy.lora import LoraSettings, is_adapter
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from freshper_lightning.replay import AbsoluteReward
from tests.loop import fit, policy, replay_data
from tests.policy.transcripts import packed, statistics, transcript

ITEMS = [transcript(40, 1), transcript(23, 2), transcript(11, 3)]


def critical(path, moved=True, **settings) -> PolicyNet:
    """A network with a critic, whose weights have been moved away from 0."""
    net = PolicyNet.from_pretrained(path)
    net.add_critic(CriticSettings(**settings))
    if moved:
        torch.nn.init.normal_(net.critic.linear.weight, generator=torch.Generator().manual_seed(0))
    return net


def test_a_new_critic_says_zero_and_changes_no_log_probability(model_path):
    net, batch = PolicyNet.from_pretrained(model_path), packed(ITEMS)
    before = statistics(net, batch)
    assert before.values is None
    after = statistics(critical(model_path, moved=False), batch)
    assert torch.equal(after.log_probs, before.log_probs)
    assert torch.equal(after.entropy, before.entropy)
    assert after.values.tolist() == [0.0] * len(batch.targets)


@pytest.mark.parametrize(("detached", "reached"), [(False, True), (True, False)])
def test_the_value_loss_reaches_the_network_unless_it_is_detached(model_path, detached, reached):
    net = critical(model_path, detached=detached)
    statistics(net, packed(ITEMS)).values.square().sum().backward()
    assert net.critic.linear.weight.grad.any()
    assert net.critic.linear.bias.grad.any()
    assert any(p.grad is not None and bool(p.grad.any()) for p in net.model.parameters()) == reached


def test_gradients_are_the_same_where_activations_are_computed_again(model_path):
    seen = []
    for again in (False, True):
        net = critical(model_path)
        if again:
            net.model.gradient_checkpointing_enable({"use_reentrant": False})
        found = statistics(net, packed(ITEMS))
        (found.values.square().sum() + found.log_probs.sum()).backward()
        seen.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *seen))


def test_values_are_float32_under_autocast_and_rounded_by_nothing_but_the_network(model_path):
    net, batch = critical(model_path), packed(ITEMS)
    states = []
    net.critic.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        values = statistics(net, batch).values
    assert values.dtype == torch.float32
    expected = states[0].float() @ net.critic.linear.weight[0] + net.critic.linear.bias
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


def test_an_engine_and_an_export_are_given_the_policy_without_its_critic(tmp_path, model_path):
    net = critical(model_path)
    assert {name for name, _ in net.checkpoint_tensors()} == {name for name, _ in net.model.named_parameters()}
    export_policy(net, model_path, tmp_path / "exported")
    again = PolicyNet.from_pretrained(tmp_path / "exported")
    assert all(map(torch.equal, again.model.parameters(), net.model.parameters()))


def trained(folder, model_path, lora):
    """Folder of a run with a critic, and its module."""
    module = policy(model_path, algorithm=PPO(), lora=lora, critic=CriticSettings())
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4)
    data = replay_data(priority=AbsoluteReward(), replay_updates=1)
    fit(folder, module, data, iterations=1, checkpoint=keep)
    return folder, module


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_path):
    """A run with adapters and a critic."""
    return trained(tmp_path_factory.mktemp("run"), model_path, LoraSettings(r=2))


def exported_log_probs(run, model_path, path):
    """Of the exported checkpoint of a run, and of the run's own policy."""
    export(str(run[0] / "step=4.ckpt"), str(model_path), str(path))
    with torch.no_grad():
        return [statistics(net, packed(ITEMS)).log_probs for net in (PolicyNet.from_pretrained(path), run[1].policy)]


def test_an_export_needs_the_model_that_the_run_started_from(run, tmp_path):
    build_tiny(tmp_path / "other", TinySpec(hidden_size=32, heads=2, kv_heads=1), byte_tokenizer())
    with pytest.raises(ConfigurationError, match=r"model='.*other' is not what the run of checkpoint='.*step=4\.ckpt'"):
        export(str(run[0] / "step=4.ckpt"), str(tmp_path / "other"), str(tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()


def test_a_checkpoint_with_a_critic_is_exported_without_it(tmp_path, model_path):
    ours, expected = exported_log_probs(trained(tmp_path, model_path, lora=None), model_path, tmp_path / "exported")
    assert torch.equal(ours, expected)


def test_a_checkpoint_with_adapters_and_a_critic_is_exported_without_it_and_merged(run, tmp_path, model_path):
    torch.testing.assert_close(*exported_log_probs(run, model_path, tmp_path))


def test_with_adapters_the_critic_is_trained_and_saved_beside_them(run):
    folder, module = run
    trained = {name for name, parameter in module.net.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not is_adapter(name)} == {"critic.linear.weight", "critic.linear.bias"}
    assert module.net.critic.linear.weight.any()
    saved = torch.load(folder / "step=4.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {f"net.{name}" for name in trained}
    assert torch.equal(saved["net.critic.linear.weight"], module.net.critic.linear.weight)


def resume(run, folder, model_path, **fields):
    module = policy(model_path, lora=LoraSettings(r=2), **fields)
    data = replay_data(priority=AbsoluteReward(), replay_updates=1)
    fit(folder, module, data, iterations=1, ckpt_path=run[0] / "step=4.ckpt", enable_checkpointing=False)
    return module


def test_a_resumed_run_has_its_critic_again(run, model_path, tmp_path):
    module = resume(run, tmp_path, model_path, algorithm=PPO(), critic=CriticSettings(detached=True))
    assert torch.equal(module.net.critic.linear.weight, run[1].net.critic.linear.weight)


def test_a_checkpoint_with_a_critic_is_refused_without_one(run, model_path, tmp_path):
    with pytest.raises(ConfigurationError, match=r"model\.critic=None, but the checkpoint .*'detached': False"):
        resume(run, tmp_path, model_path)
