"""Masks for models that say in other ways than the families of the tiny policy what their layers see."""

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, MistralConfig, MistralForCausalLM

from freshper_lightning.policy.attention import can_share
from freshper_lightning.policy.net import PolicyNet
from tests.policy.transcripts import alone, family, packed, statistics, transcript

WINDOW = 8


@pytest.fixture
def net():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(vocab_size=320, sliding_window=WINDOW, max_position_embeddings=128, **sizes, **heads)
    return PolicyNet(MistralForCausalLM(config))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_window_for_all_layers_reaches_into_the_shared_opening_as_far_as_it_should(net, implementation):
    net.model.set_attn_implementation(implementation)
    items = [*family(24, (9, 17, 1)), transcript(30, 4)]
    batch = packed(items, phase="demonstration", share=True)
    assert batch.spans is not None
    expected = torch.cat([alone(net, item)[0] for item in items])
    torch.testing.assert_close(statistics(net, batch).log_probs.double(), expected, rtol=0, atol=1e-5)


def test_a_window_matters_here(net):
    (item,) = family(24, (17,))
    windowed = alone(net, item)[0]
    net.model.config.sliding_window = 64
    assert (alone(net, item)[0] - windowed).abs().max() > 1e-3


def test_other_attention_and_other_kinds_of_layers_share_nothing(net):
    assert can_share(net.model)
    net.model.config.layer_types = ["full_attention", "linear_attention"]
    assert not can_share(net.model)
    net.model.config.layer_types = None
    net.model.config._attn_implementation = "flex_attention"
    assert not can_share(net.model)


def test_a_family_with_windows_that_its_masks_do_not_tell_shares_nothing():
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    config = GPTNeoConfig(vocab_size=320, window_size=WINDOW, max_position_embeddings=128, **sizes)
    assert not PolicyNet(GPTNeoForCausalLM(config)).shares_openings


def test_where_sharing_does_not_come_out_right_nothing_is_shared(net, monkeypatch, caplog):
    net.require_parity_of_sharing("here")
    assert net.shares_openings
    monkeypatch.setattr("freshper_lightning.policy.net.attention_masks", lambda *_: None)
    net.require_parity_of_sharing("here")
    assert not net.shares_openings
    assert "here: prompts are not shared" in caplog.text
