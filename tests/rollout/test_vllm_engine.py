"""What the vLLM engine does to the process that it lives in."""

import gc
import os
import random
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from freshper_lightning.rollout import vllm_engine
from freshper_lightning.rollout.vllm_engine import RESERVED
from tests.rollout.rigs import checkpoint, engine_for, request, requests

pytestmark = pytest.mark.vllm


def host():
    """Everything about the process that an engine must leave alone."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "precision": torch.get_float32_matmul_precision(),
        "frozen": gc.get_freeze_count(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "destroy": dist.destroy_process_group,
    }


@pytest.fixture
def unusual_host():
    """Settings that vLLM would change if it could."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    torch.rand(7)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class AnswersToEverything:
    """As the library object of llvmlite, which numba imports."""

    def __getattribute__(self, name):
        return object()


def test_an_engine_starts_beside_a_package_that_vllm_cannot_look_into(tmp_path, monkeypatch):
    module = ModuleType("llvmlite.binding.ffi")
    module.lib = AnswersToEverything()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine = engine_for("vllm", checkpoint(tmp_path))
    assert sys.modules[module.__name__] is module
    assert len(engine.generate(requests(2))) == 2
    engine.close()


@pytest.mark.usefixtures("unusual_host")
def test_construction_and_closing_leave_the_process_as_it_was(tmp_path):
    before = host()
    engine = engine_for("vllm", checkpoint(tmp_path))
    assert host() == before
    engine.generate([*requests(3), request(9, [5, 6], temperature=0.0)])
    assert host() == before
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    engine.close()
    assert host() == before
    assert not dist.is_initialized()


@pytest.mark.usefixtures("process_group")
def test_a_process_group_that_was_there_before_is_usable_meanwhile_and_afterwards(tmp_path):
    subgroup = dist.new_group([0])
    for _ in range(2):
        engine = engine_for("vllm", checkpoint(tmp_path / "model"))
        engine.generate(requests(2))
        engine.close()
        for group in (None, subgroup):
            total = torch.ones(3)
            dist.all_reduce(total, group=group)
            assert total.tolist() == [1.0, 1.0, 1.0]


def test_every_argument_that_the_engine_sets_is_reserved(tmp_path, monkeypatch):
    class BuiltError(Exception):
        pass

    def build(arguments):
        raise BuiltError(sorted(arguments))

    monkeypatch.setattr(vllm_engine, "_build", build)
    with pytest.raises(BuiltError) as built:
        engine_for("vllm", checkpoint(tmp_path))
    assert built.value.args[0] == sorted(RESERVED)


def test_options_reach_vllm_unless_the_engine_sets_them_itself(tmp_path):
    path = checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"options must not name 'logprobs_mode', which the engine sets"):
        engine_for("vllm", path, options={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(TypeError, match="no_such_option"):
        engine_for("vllm", path, options={"no_such_option": 1})
    engine = engine_for("vllm", path, options={"block_size": 32})
    assert engine._llm.llm_engine.vllm_config.cache_config.block_size == 32
    engine.close()


def test_heads_of_a_size_that_vllm_cannot_run_on_a_cpu_are_refused_early(tmp_path):
    build_tiny(tmp_path, TinySpec("llama", hidden_size=32, layers=1), byte_tokenizer())
    with pytest.raises(ValueError, match=r"have 8 dimensions, and on a CPU vLLM takes 32, 64.*name=transformers"):
        engine_for("vllm", tmp_path)
    assert not dist.is_initialized()


def test_a_long_prompt_is_sampled_though_others_have_used_up_the_step(tmp_path):
    engine = engine_for("vllm", checkpoint(tmp_path), options={"max_num_batched_tokens": 256})
    received = engine.generate([request(index, [3 + index] * 150, max_tokens=3) for index in range(5)])
    assert [len(answer.token_ids) for answer in received] == [3, 3, 3, 3, 3]
    engine.close()
