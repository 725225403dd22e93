import logging
from importlib.util import find_spec

import pytest

from freshper_lightning.rollout.checkpoint import stop_token_ids
from freshper_lightning.rollout.factory import EngineConfig, build_engine
from tests.rollout.rigs import STOP, checkpoint, requests

VLLM = find_spec("vllm") is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "sglang"}, r"name must be one of auto, transformers, vllm, not 'sglang'"),
        ({"dtype": "fp32"}, r"dtype must be one of float32, bfloat16, float16, not 'fp32'"),
        ({"max_model_len": 1}, r"max_model_len must be at least 3, not 1"),
        ({"max_batch_size": 0}, r"max_batch_size must be at least 1, not 0"),
        ({"kv_cache_mib": -1}, r"kv_cache_mib must be at least 0, not -1"),
        ({"name": "vllm", "kv_cache_mib": 0}, r"kv_cache_mib must be positive for the vllm engine"),
        ({"name": "transformers", "options": {"block_size": 32}}, r"options must be empty for the transformers engine"),
        ({"options": {"max_num_seqs": 8}}, r"must not name 'max_num_seqs', which rollout\.engine\.max_batch_size sets"),
    ],
)
def test_wrong_values_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_auto_takes_vllm_where_it_is_installed():
    name, reason = EngineConfig().resolve()
    assert name == ("vllm" if VLLM else "transformers")
    assert reason.startswith("auto: vLLM is")


def test_the_log_says_which_engine_runs_and_why(tmp_path, caplog):
    config = EngineConfig(name="transformers", max_model_len=128)
    with caplog.at_level(logging.INFO, logger="freshper_lightning"):
        engine = build_engine(config, checkpoint(tmp_path), seed=0, device="cpu")
    assert engine.name == "transformers"
    assert "transformers engine (asked for by name)" in caplog.text
    assert len(engine.generate(requests(2))) == 2
    engine.close()


def test_stop_tokens_come_from_the_generation_config_else_the_model_else_the_tokenizer(tmp_path):
    path = checkpoint(tmp_path)
    generation, model = path / "generation_config.json", path / "config.json"
    assert stop_token_ids(path) == (STOP,)
    generation.write_text('{"eos_token_id": [7, 9]}')
    assert stop_token_ids(path) == (7, 9)
    generation.unlink()
    model.write_text(model.read_text().replace(f'"eos_token_id": {STOP}', '"eos_token_id": 11'))
    assert stop_token_ids(path) == (11,)
    model.write_text(model.read_text().replace('"eos_token_id": 11', '"eos_token_id": null'))
    assert stop_token_ids(path) == (STOP,)


def test_a_checkpoint_without_any_stop_token_is_refused(tmp_path):
    path = checkpoint(tmp_path)
    (path / "generation_config.json").unlink()
    for name in ("config.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        (path / name).write_text(
            text.replace(f'"eos_token_id": {STOP}', '"eos_token_id": null').replace('"eos_token"', '"x"')
        )
    with pytest.raises(ValueError, match="names no eos_token_id"):
        stop_token_ids(path)
