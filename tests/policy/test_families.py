"""Every family of models that is supported, in tiny form, with tied and untied heads."""

import pytest
import torch

from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.tiny import CONFIGS, TinySpec, build_tiny, byte_tokenizer
from tests.policy.transcripts import family, packed, transcript
from tests.rollout.rigs import Rig, checkpoint, engine_for, requests, train

TEMPERATURE = 0.8
WITH_ENTROPY = {"temperature": TEMPERATURE, "with_entropy": True, "entropy_gradient": True}


@pytest.fixture(scope="module", params=[(family, tied) for family in CONFIGS for tied in (True, False)], ids=str)
def path(request, tmp_path_factory):
    family, tied = request.param
    folder = tmp_path_factory.mktemp(family)
    spec = TinySpec(family, hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate=96, tied=tied)
    build_tiny(folder, spec, byte_tokenizer())
    return folder


def plain_loss(net, item):
    """Sum over the sampled tokens of log-probability plus a tenth of the entropy, from the model's own logits."""
    logits = net.model(item.token_ids[None].long(), use_cache=False).logits[0, item.sampled_positions() - 1]
    all_log_probs = (logits / TEMPERATURE).log_softmax(-1)
    targets = item.token_ids[item.sampled_positions()].long()
    log_probs = all_log_probs.gather(1, targets[:, None]).sum()
    return log_probs - 0.1 * (all_log_probs.exp() * all_log_probs).sum()


def gradients(net):
    seen = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    return seen


def assert_plain(net, items, batch):
    """Loss and gradients of the batch are those of the items one by one, from the model's own logits."""
    log_probs, entropy, _ = net(**batch.forward_arguments(), **WITH_ENTROPY)
    loss = log_probs.sum() + 0.1 * entropy.sum()
    loss.backward()
    mine = gradients(net)
    expected = sum(plain_loss(net, item) for item in items)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for seen, theirs in zip(mine, gradients(net), strict=True):
        assert (seen - theirs).norm() <= 1e-4 * theirs.norm()


def test_loss_and_gradients_are_those_of_the_models_own_logits(path):
    net = PolicyNet.from_pretrained(path)
    items = [transcript(40, 1), transcript(23, 2), transcript(11, 3)]
    batch = packed(items)
    assert len(batch.input_ids) < 3, "conversations share a row"
    assert_plain(net, items, batch)


WINDOW = 16


def test_a_shared_opening_changes_neither_loss_nor_gradients(path):
    net = PolicyNet.from_pretrained(path)
    config = net.model.config
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = WINDOW
    items = [*family(24, (9, 17, 1)), transcript(30, 4), *family(12, (5, 5), seed=1)]
    batch = packed(items, share=True)
    assert batch.spans is not None
    assert batch.input_ids.numel() < sum(item.num_tokens for item in items)
    assert_plain(net, items, batch)


def assert_agreement(kind, path):
    net, engine = PolicyNet.from_pretrained(path), engine_for(kind, path)
    train(net.model)
    engine.load_weights(net.checkpoint_tensors(), version=1)
    sent = requests(4)
    assert Rig(engine, net.model, (0.0, 0.0)).gap(sent, engine.generate(sent)) <= 1e-4
    engine.close()


def test_the_trainer_and_an_engine_agree_about_what_the_engine_sampled(path):
    assert_agreement("transformers", path)


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["gemma3"])
def test_vllm_agrees_with_the_families_that_the_engine_contract_leaves_out(tmp_path, family):
    assert_agreement("vllm", checkpoint(tmp_path, family))


def test_where_attention_is_soft_capped_the_cap_is_computed(path):
    net = PolicyNet.from_pretrained(path)
    assert (net.model.config._attn_implementation == "eager") == (net.model.config.model_type == "gemma2")


def test_values_are_those_of_the_models_own_last_hidden_states(path):
    net = PolicyNet.from_pretrained(path)
    net.add_critic(CriticSettings())
    torch.nn.init.normal_(net.critic.linear.weight, generator=torch.Generator().manual_seed(0))
    items = [transcript(40, 1), transcript(23, 2), transcript(11, 3)]
    batch = packed(items)
    with torch.no_grad():
        seen = net(**batch.forward_arguments()).values
        own = [net.model(i.token_ids[None].long(), output_hidden_states=True).hidden_states[-1][0] for i in items]
        expected = [net.critic(h[i.sampled_positions() - 1]) for h, i in zip(own, items, strict=True)]
    torch.testing.assert_close(seen, torch.cat(expected), rtol=1e-4, atol=1e-4)
