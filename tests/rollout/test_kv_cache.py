"""Keys and values that outlive a reply: never a different sample, never more memory than allowed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3Config, LlamaConfig

from freshper_lightning.rollout.kv_cache import ConversationCache, KVRows, concatenate
from freshper_lightning.rollout.transformers_engine import TransformersEngine, _attends_to_everything
from tests.rollout.rigs import checkpoint, request


def rows(conversations, width=None, seed=0):
    """Rows whose keys are their tokens and whose holes are garbage, scattered over ``width`` columns."""
    generator = np.random.default_rng(seed)
    width = width or max(len(tokens) for tokens in conversations) + 3
    mask = torch.zeros(len(conversations), width, dtype=torch.bool)
    keys = torch.full((len(conversations), 2, width, 4), float("nan"))
    for row, tokens in enumerate(conversations):
        columns = torch.from_numpy(np.sort(generator.choice(width, len(tokens), replace=False)))
        mask[row, columns] = True
        keys[row, :, columns] = torch.tensor(tokens, dtype=torch.float32)[None, :, None].expand(2, -1, 4)
    return KVRows(((keys, -keys),), mask, tuple(np.array(tokens, dtype=np.int64) for tokens in conversations))


def test_a_window_is_seen_where_a_model_of_text_and_images_says_it():
    """Its layers would otherwise count holes between cached columns as tokens."""
    assert _attends_to_everything(LlamaConfig())
    assert not _attends_to_everything(Gemma3Config())
    assert not _attends_to_everything(Gemma3Config().text_config)


def stored(kept: KVRows, row):
    keys, values = kept.layers[0]
    assert torch.equal(keys[row][:, kept.mask[row]], -values[row][:, kept.mask[row]])
    return keys[row, 0, kept.mask[row], 0].long().tolist()


conversations = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5)


@given(conversations, st.data())
@settings(max_examples=60, deadline=None)
def test_selected_rows_keep_their_tokens_and_lose_their_holes(known, data):
    chosen = data.draw(st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=6))
    kept = rows(known).select(chosen)
    assert kept.mask.shape[1] == max(len(known[row]) for row in chosen)
    assert all(stored(kept, place) == known[row] for place, row in enumerate(chosen))
    assert bool(kept.mask[:, -1].all())


@given(conversations, conversations)
@settings(max_examples=30, deadline=None)
def test_joined_rows_keep_their_tokens(first, second):
    joined = concatenate([rows(first), rows(second, seed=1)])
    assert [stored(joined, row) for row in range(len(first) + len(second))] == first + second
    assert [tokens.tolist() for tokens in joined.tokens] == first + second


@given(st.lists(conversations, min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_longest_known_beginning_is_found(blocks, prompt):
    cache = ConversationCache(1 << 20)
    for block in blocks:
        cache.put(rows(block))
    known = [tokens for block in blocks for tokens in block if len(tokens) < len(prompt)]
    beginnings = [tokens for tokens in known if prompt[: len(tokens)] == tokens]
    ref = cache.find(np.array(prompt, dtype=np.int64))
    if not beginnings:
        assert ref is None
    else:
        assert ref is not None
        assert stored(cache.take([ref]), 0) == max(beginnings, key=len)


@given(st.lists(conversations, min_size=1, max_size=8), st.integers(0, 3000))
@settings(max_examples=60, deadline=None)
def test_memory_stays_within_its_bound_and_every_entry_can_be_taken(blocks, bound):
    cache = ConversationCache(bound)
    for block in blocks:
        cache.put(rows(block))
        assert cache.nbytes() <= bound
    for tokens in (tokens for block in blocks for tokens in block):
        ref = cache.find(np.array([*tokens, 9], dtype=np.int64))
        if ref is not None:
            assert stored(cache.take([ref]), 0) == tokens[: ref.length]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_reused_beginning_gives_the_samples_of_a_fresh_start(tmp_path, family):
    path = checkpoint(tmp_path, family)
    engines = [TransformersEngine(path, max_batch_size=5, kv_cache_mib=mib) for mib in (64, 0)]
    generator = np.random.default_rng(0)
    talks = [generator.integers(3, 259, 4 + 3 * (index // 2)).tolist() for index in range(12)]
    for turn in range(5):
        sent = [request(i, talk, max_tokens=6, temperature=0.7, seed=turn * 100 + i) for i, talk in enumerate(talks)]
        reused, fresh = (engine.generate(sent) for engine in engines)
        assert [answer.token_ids for answer in reused] == [answer.token_ids for answer in fresh]
        for one, other in zip(reused, fresh, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        for talk, answer in zip(talks, reused, strict=True):
            assert turn == 0 or engines[0]._conversations.find(np.array(talk, dtype=np.int64)) is not None
            talk += [*answer.token_ids, *generator.integers(3, 259, generator.integers(1, 9)).tolist()]
        if turn == 2:
            talks = [talks[index] for index in (0, 0, 7, 3, 11, 4)]


def test_new_weights_drop_what_old_ones_computed(tmp_path):
    engine = TransformersEngine(checkpoint(tmp_path))
    reply = engine.generate([request(0, [5, 6, 7], max_tokens=4)])[0]
    longer = np.array([5, 6, 7, *reply.token_ids, 8], dtype=np.int64)
    assert engine._conversations.find(longer) is not None
    engine.load_weights([(name, value * 1.5) for name, value in engine._names.parameters.items()], 1)
    assert engine._conversations.find(longer) is None
    assert engine._conversations.nbytes() == 0
