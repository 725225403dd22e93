"""Adapters: what trains, what an engine, an export, a checkpoint and a reference are made of."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.commands import export
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.export import export_policy
from freshper_lightning.policy.lora import BasePolicy, LoraSettings, is_adapter
from freshper_lightning.policy.net import PolicyNet
from tests.loop import Recorder, fit, policy, replay_data
from tests.policy.transcripts import packed, statistics, transcript
from tests.rollout.rigs import Rig, checkpoint, engine_for, requests

SETTINGS = LoraSettings(r=4, alpha=8)


def adapted(path, settings=SETTINGS, seed=0):
    """A network whose adapters have been moved away from where they begin."""
    net = PolicyNet.from_pretrained(path)
    net.add_adapters(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return net


def states(net):
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def log_probs(net):
    with torch.no_grad():
        return statistics(net, packed([transcript(30), transcript(17, 1)])).log_probs


def test_adapters_leave_the_output_as_it_is_and_alone_have_a_gradient(model_path):
    net = PolicyNet.from_pretrained(model_path)
    before = log_probs(net)
    net.add_adapters(SETTINGS)
    assert torch.equal(log_probs(net), before)
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in net.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * 7 * 2, "two halves for each of seven layers in each of two blocks"


def test_where_adapters_start_follows_the_seed_and_not_what_has_drawn_from_it(model_path):
    def started(seed, draws):
        torch.manual_seed(seed)
        torch.rand(draws)
        net = PolicyNet.from_pretrained(model_path)
        state = torch.get_rng_state()
        net.add_adapters(SETTINGS)
        assert torch.equal(torch.get_rng_state(), state)
        return states(net)

    first, later, other = started(1, 0), started(1, 5), started(2, 0)
    down = next(name for name in first if ".lora_A." in name)
    assert torch.equal(first[down], later[down])
    assert not torch.equal(first[down], other[down])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*\.1\.mlp\..*_proj"])
@pytest.mark.parametrize("tied", [True, False])
def test_merged_tensors_are_those_of_peft_and_leave_every_weight_as_it_was(tmp_path, tied, targets):
    path = checkpoint(tmp_path / "base", tied=tied)
    net = adapted(path, LoraSettings(4, 8.0, targets))
    before = states(net)
    merged = dict(net.checkpoint_tensors())
    assert all(torch.equal(value, before[name]) for name, value in states(net).items())
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    for name, module in net.model.named_modules():
        if hasattr(module, "lora_A"):
            expected = module.get_base_layer().weight + module.get_delta_weight("default")
            torch.testing.assert_close(merged[f"{name}.weight"], expected)
            assert not torch.equal(merged[f"{name}.weight"], module.get_base_layer().weight)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_engine_is_given_the_merged_policy(tmp_path, kind):
    path = checkpoint(tmp_path)
    net, engine = adapted(path), engine_for(kind, path)
    engine.load_weights(net.checkpoint_tensors(), version=3)
    sent = requests(4)
    received = engine.generate(sent)
    assert Rig(engine, net.model, (0.0, 0.0)).gap(sent, received) <= 1e-4
    base = PolicyNet.from_pretrained(path)
    assert Rig(engine, base.model, (0.0, 0.0)).gap(sent, received) > 0.01
    engine.close()


def test_an_exported_policy_is_an_ordinary_checkpoint_of_the_merged_weights(tmp_path):
    path = checkpoint(tmp_path / "base")
    net = adapted(path)
    before = states(net)
    export_policy(net, path, tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in states(net).items())
    torch.testing.assert_close(log_probs(PolicyNet.from_pretrained(tmp_path / "out")), log_probs(net))


def test_the_base_policy_is_the_network_without_its_adapters(model_path):
    net = adapted(model_path)
    batch = packed([transcript(30), transcript(17, 1)])
    forward = (batch.input_ids, batch.position_ids, batch.predicted_from, batch.targets)
    seen = BasePolicy(net)(*forward).log_probs
    assert torch.equal(seen, log_probs(PolicyNet.from_pretrained(model_path)))
    assert not seen.requires_grad
    assert float((log_probs(net) - seen).abs().max()) > 0.01
    net(*forward).log_probs.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in net.parameters() if parameter.requires_grad)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_path):
    """A run with a KL term to the reference: its folder, module and what was seen."""
    folder, seen = tmp_path_factory.mktemp("lora"), Recorder()
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.5), lora=SETTINGS)
    fit(folder, module, replay_data(), extra=(seen,), checkpoint=ModelCheckpoint(folder, save_last=True))
    return folder, module, seen


def test_a_run_moves_the_adapters_and_nothing_else(run, model_path):
    _, module, seen = run
    base = PolicyNet.from_pretrained(model_path).model.state_dict()
    for name, parameter in module.policy.model.named_parameters():
        if is_adapter(name):
            assert "lora_B" not in name or float(parameter.detach().abs().max()) > 1e-3
        else:
            assert torch.equal(parameter, base[name.replace(".base_layer.", ".")])
    assert seen.batches[0].spans is not None, "members of a group share their prompt"
    assert float(seen.metric("log_ratio")[0].abs().max()) <= 1e-4, "the engine sampled with other weights"


def test_the_reference_is_the_base_and_no_second_copy_of_it(run):
    _, module, seen = run
    assert isinstance(module.reference, BasePolicy)
    kl = [float(values.mean()) for values in seen.metric("kl_reference")]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-6


def test_a_checkpoint_holds_adapters_only_and_an_export_of_it_the_merged_policy(run, model_path, tmp_path):
    folder, module, _ = run
    state = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    assert state
    assert all(is_adapter(name) for name in state)
    export(str(folder / "last.ckpt"), str(model_path), str(tmp_path))
    torch.testing.assert_close(log_probs(PolicyNet.from_pretrained(tmp_path)), log_probs(module.policy))


def test_a_resumed_run_has_adapters_and_base_again(run, model_path, tmp_path):
    folder, module, _ = run
    again = policy(model_path, algorithm=GRPO(kl_coefficient=0.5), lora=SETTINGS)
    fit(tmp_path, again, replay_data(), ckpt_path=folder / "last.ckpt", iterations=2)
    assert all(torch.equal(mine, other) for mine, other in zip(again.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("lora", [None, LoraSettings(r=2)])
def test_a_checkpoint_with_other_adapters_is_refused(run, model_path, tmp_path, lora):
    module = policy(model_path, algorithm=GRPO(kl_coefficient=0.5), lora=lora)
    with pytest.raises(ConfigurationError, match=r"model\.lora=.* was written with \{'r': 4"):
        fit(tmp_path, module, replay_data(), ckpt_path=run[0] / "last.ckpt", iterations=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, r"lora\.r must be at least 1, not 0"),
        ({"alpha": 0}, r"lora\.alpha must be at least 1, not 0"),
        ({"dropout": 0.1}, r"lora\.dropout must be 0, since the engine samples without dropout, not 0\.1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(**fields)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], r"must name linear layers other than the output head, not lm_head"),
        (["embed_tokens"], r"must name linear layers other than the output head, not model\.embed_tokens"),
        (["no_such"], r": Target modules .*no_such.* not found in the base model"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused_by_key(model_path, targets, message):
    net = PolicyNet.from_pretrained(model_path)
    with pytest.raises(ConfigurationError, match=r"model\.lora\.target_modules=.*" + message):
        net.add_adapters(LoraSettings(target_modules=targets))
