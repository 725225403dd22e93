import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig

from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.export import export_policy
from freshper_lightning.policy.log_prob import linear_log_probs
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from tests.policy.transcripts import alone, packed, statistics, transcript


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_log_probs_and_entropy_are_those_of_the_tempered_distribution(net, temperature):
    item = transcript(25, 3)
    seen = statistics(net, packed([item]), temperature)
    log_probs, entropy = alone(net, item, temperature)
    torch.testing.assert_close(seen.log_probs.double(), log_probs, rtol=0, atol=2e-6)
    torch.testing.assert_close(seen.entropy.double(), entropy, rtol=0, atol=4e-6)


def test_entropy_is_computed_only_where_it_is_asked_for(net):
    assert statistics(net, packed([transcript(9)]), with_entropy=False).entropy is None


def test_entropy_has_the_gradient_of_the_formula_where_it_is_asked_for_and_none_otherwise(net):
    item = transcript(15, 2)
    batch = packed([item])
    forward = (batch.input_ids, batch.position_ids, batch.predicted_from, batch.targets, 0.7)
    assert not net(*forward, with_entropy=True).entropy.requires_grad
    net(*forward, with_entropy=True, entropy_gradient=True).entropy.sum().backward()
    seen = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    logits = net.model(item.token_ids[None].long()).logits[0, item.sampled_positions() - 1] / 0.7
    torch.distributions.Categorical(logits=logits).entropy().sum().backward()
    for mine, parameter in zip(seen, net.parameters(), strict=True):
        assert (mine - parameter.grad).norm() <= 1e-4 * parameter.grad.norm()
    net.zero_grad()


def test_only_selected_positions_reach_the_head_and_the_loss(net, monkeypatch):
    """The head sees S rows, and a token after the last selected position cannot matter."""
    item = transcript(20, 1, turns=[(5, 9)])
    changed = transcript(20, 1, turns=[(5, 9)])
    changed.token_ids[9:] = 7
    rows = []

    def head(hidden, *rest):
        rows.append(len(hidden))
        return linear_log_probs(hidden, *rest)

    monkeypatch.setattr("freshper_lightning.policy.net.linear_log_probs", head)
    one, other = statistics(net, packed([item])), statistics(net, packed([changed]))
    assert rows == [4, 4]
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-6)


def test_what_stands_before_a_selected_position_matters(net):
    changed = transcript(20, 1, turns=[(5, 9)])
    changed.token_ids[2] = 7
    one = statistics(net, packed([transcript(20, 1, turns=[(5, 9)])]))
    assert (statistics(net, packed([changed])).log_probs - one.log_probs).abs().min() > 1e-6


def test_a_folder_without_a_model_is_refused_by_key(tmp_path):
    with pytest.raises(ValueError, match=rf"model\.path='{tmp_path}'.*config\.json"):
        PolicyNet.from_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_policy_is_an_ordinary_checkpoint_with_the_trained_weights(tmp_path, tied):
    build_tiny(tmp_path / "base", TinySpec(hidden_size=32, layers=1, heads=2, kv_heads=1, tied=tied), byte_tokenizer())
    net = PolicyNet.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    export_policy(net, tmp_path / "base", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(3, 259, (1, 12))
    assert torch.equal(loaded(ids).logits, net.model.eval()(ids).logits)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_weights_are_float32_and_the_network_is_in_training_mode(net):
    """A model in evaluation mode would silently ignore gradient checkpointing."""
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert all(module.training for module in net.modules())


def build(path, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}


def test_a_model_that_scales_its_logits_behind_the_head_is_refused(tmp_path):
    build(tmp_path, GraniteConfig(**SIZES, logits_scaling=4.0, initializer_range=0.5))
    with pytest.raises(ConfigurationError, match=r"differ from the model's own.*GraniteForCausalLM is not supported"):
        PolicyNet.from_pretrained(tmp_path)


def test_dropout_is_switched_off(tmp_path):
    build(tmp_path, LlamaConfig(**SIZES, attention_dropout=0.5))
    net = PolicyNet.from_pretrained(tmp_path)
    rows, positions = torch.arange(10)[None], torch.arange(10)[None]
    inputs = (rows, positions, torch.arange(9), torch.arange(1, 10))
    assert net.training
    assert torch.equal(net(*inputs).log_probs, net(*inputs).log_probs)


def test_a_checkpoint_that_lacks_weights_or_holds_nan_is_refused(tmp_path):
    lacking = build(tmp_path / "lacking", LlamaConfig(**SIZES))
    weights = load_file(lacking / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1.mlp" not in k}, lacking / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"lacks weights: model\.layers\.1\.mlp"):
        PolicyNet.from_pretrained(lacking)
    broken = build(tmp_path / "broken", LlamaConfig(**SIZES))
    save_file({k: v * float("nan") for k, v in weights.items()}, broken / "model.safetensors")
    with pytest.raises(ConfigurationError, match="differ from the model's own by nan"):
        PolicyNet.from_pretrained(broken)
