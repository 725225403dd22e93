import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer, train_tokenizer

PROSE = "You are walking on a frozen lake. Reach the goal and avoid every hole in the ice.\n"
TEXTS = [f"<|im_start|>user\n{PROSE}Row {row}: S F H G\n<|im_end|>\n" * 3 for row in range(30)]
BYTES = byte_tokenizer()
TRAINED = train_tokenizer(TEXTS, 600, isolate=r"[SFHG]|\d| ")
MESSAGES = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Left"}]


def render(tokenizer, add_generation_prompt):
    return tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])
@given(text=st.text())
@settings(max_examples=60, deadline=None)
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


@given(before=st.text(alphabet="abS F\n1", max_size=8), cell=st.sampled_from("SFHG7"), after=st.text(max_size=8))
@settings(max_examples=60, deadline=None)
def test_isolated_matches_keep_their_tokens_whatever_stands_beside_them(before, cell, after):
    ids = TRAINED.encode(before + cell + after, add_special_tokens=False)
    parts = [TRAINED.encode(part, add_special_tokens=False) for part in (before, cell, after)]
    assert ids == parts[0] + parts[1] + parts[2]
    assert len(parts[1]) == 1


def test_fixed_prose_merges_into_long_tokens():
    ids = TRAINED.encode(f"user\n{PROSE}", add_special_tokens=False)
    assert len(ids) < len(PROSE) / 2
    whole = train_tokenizer(TEXTS, 600, isolate=r"\b[SFHG]\b|\d")
    assert len(whole.encode(f"user\n{PROSE}Row ", add_special_tokens=False)) == 1


def test_training_is_deterministic():
    assert train_tokenizer(TEXTS, 600, isolate=r"[SFHG]|\d| ").get_vocab() == TRAINED.get_vocab()


def test_chatml_renders_each_message_and_the_generation_prompt():
    expected = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\nLeft<|im_end|>\n"
    assert render(BYTES, False) == expected
    assert render(BYTES, True) == expected + "<|im_start|>assistant\n"
    ids = BYTES.encode(expected, add_special_tokens=False)
    assert ids.count(BYTES.eos_token_id) == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_loads_through_the_auto_classes(tmp_path, family, tied):
    build_tiny(tmp_path, TinySpec(family, tied=tied), TRAINED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loader = PreTrainedTokenizerFast if family == "qwen2" else AutoTokenizer
    tokenizer = loader.from_pretrained(tmp_path)
    assert model.config.model_type == family
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.vocab_size == 320
    assert tokenizer.get_vocab() == TRAINED.get_vocab()
    assert tokenizer.encode("S F<|im_end|>", add_special_tokens=False) == TRAINED.encode(
        "S F<|im_end|>", add_special_tokens=False
    )
    assert render(tokenizer, True) == render(TRAINED, True)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.eos_token_id
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    assert 0.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.3e6


def test_weights_depend_on_the_seed_alone_and_global_random_state_is_kept(tmp_path):
    state = torch.get_rng_state()
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        build_tiny(tmp_path / name, TinySpec(seed=seed), BYTES)
        torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
        torch.rand(3)
        state = torch.get_rng_state()
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"family": "gpt"}, r"family.*llama"), ({"heads": 3}, r"heads.*128.*3"), ({"kv_heads": 3}, r"kv_heads.*4.*3")],
)
def test_impossible_specs_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        TinySpec(**fields)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size.*259.*100"):
        train_tokenizer(TEXTS, 100, isolate=" ")
