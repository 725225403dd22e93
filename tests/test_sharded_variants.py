"""Adapters, bfloat16 and prepared epochs with parameters sharded over two ranks."""

import os
import subprocess
import sys

import pytest
import torch

from freshper_lightning.policy.lora import is_adapter
from freshper_lightning.policy.net import PolicyNet
from tests.command import PATIENCE, ROOT

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_path):
    """What each of two ranks saw of each variant, and what one process saw."""
    folder = tmp_path_factory.mktemp("variants")
    for ranks, variants in ((RANKS, ("lora", "bf16", "decoupled", "lost")), (1, ("lora", "plain", "decoupled"))):
        in_processes(model_path, folder, ranks, *variants)
    return folder


def in_processes(model_path, folder, ranks, *variants):
    """Each variant in fresh processes, where nothing else has used the random state that adapters start from."""
    command = [sys.executable, "-m", "tests.sharded_variants", str(model_path), str(folder), str(ranks), *variants]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def seen(folder, name, ranks=RANKS):
    return [torch.load(folder / f"{name}_rank{rank}_of_{ranks}.pt", weights_only=True) for rank in range(ranks)]


def assert_one_policy(one, other):
    assert one["norms"] == other["norms"]
    for name, value in one["parameters"].items():
        assert torch.equal(value, other["parameters"][name])


def test_sharded_adapters_train_as_those_of_one_process_and_merge_alike(folder, model_path):
    one, other = seen(folder, "lora")
    (alone,) = seen(folder, "lora", 1)
    assert_one_policy(one, other)
    for name, value in alone["start"].items():
        assert torch.equal(one["start"][name], value)
    assert sorted(one["tokens"] + other["tokens"]) == sorted(alone["tokens"])
    torch.testing.assert_close(one["norms"], alone["norms"], rtol=1e-4, atol=0)
    for name, value in alone["merged"].items():
        torch.testing.assert_close(one["merged"][name], value, rtol=0, atol=1e-6)
    base = PolicyNet.from_pretrained(model_path).model.state_dict()
    for name, value in one["parameters"].items():
        moved = not torch.equal(value, base.get(name.removeprefix("model.").replace(".base_layer.", "."), value))
        assert not moved or is_adapter(name)
    assert all(value.any() for name, value in one["parameters"].items() if ".lora_B." in name)


def test_the_base_of_sharded_adapters_is_the_reference(folder):
    for rank in seen(folder, "lora"):
        first, second = (metrics["kl_reference"] for metrics in rank["metrics"])
        assert torch.equal(first, torch.zeros_like(first))
        assert float(second.mean()) > 1e-6


def test_bfloat16_ranks_keep_float32_weights_and_differ_by_rounding(folder):
    one, other = seen(folder, "bf16")
    (exact,) = seen(folder, "plain", 1)
    assert_one_policy(one, other)
    assert one["dtypes"] == ["torch.float32"]
    gap = max(float(rank["metrics"][0]["log_ratio"].abs().max()) for rank in (one, other))
    assert 1e-6 < gap < 0.02
    assert one["norms"][0] != exact["norms"][0]
    assert one["norms"][0] == pytest.approx(exact["norms"][0], rel=0.02)


def gaps(rank):
    """Largest distance from 1 of the ratio of current to proximal policy in each update, of two micro-batches."""
    ratios = [metrics["ratio"] for metrics in rank["metrics"]]
    return [float((torch.cat(ratios[i : i + 2]) - 1).abs().max()) for i in range(0, len(ratios), 2)]


def test_decoupled_updates_of_two_ranks_are_those_of_one_process(folder):
    """Fresh batches, of two epochs of two updates, have the same trajectories in both; draws have not."""
    one, other = seen(folder, "decoupled")
    (alone,) = seen(folder, "decoupled", 1)
    assert_one_policy(one, other)
    assert len(one["norms"]) == len(alone["norms"]) == 8
    torch.testing.assert_close(one["norms"][:4], alone["norms"][:4], rtol=1e-4, atol=0)
    for rank in (one, other, alone):
        found = gaps(rank)
        assert max(found[::2]) < 1e-6
        assert min(found[1::2]) > 1e-4
    torch.testing.assert_close(max(gaps(one)[1], gaps(other)[1]), gaps(alone)[1], rtol=1e-3, atol=1e-6)


def test_a_rank_without_trajectories_goes_along_in_the_preparation_of_every_epoch(folder):
    full, empty = seen(folder, "lost")
    assert_one_policy(full, empty)
    assert len(full["norms"]) == len(empty["norms"]) == 8
    assert all(len(metrics["ratio"]) == 1 for metrics in empty["metrics"])
    assert max(gaps(full)[::2]) < 1e-6 < min(gaps(full)[1::2])


def test_a_micro_batch_that_is_too_large_on_one_rank_stops_both(model_path, tmp_path):
    """The other rank has lost its trajectories, and has a filler of one token."""
    in_processes(model_path, tmp_path, RANKS, "crowded")
    messages = {(tmp_path / f"crowded_rank{rank}_of_2.txt").read_text() for rank in range(RANKS)}
    (message,) = messages
    assert message.startswith("model.max_micro_batch_tokens=160, but a micro-batch takes ")
