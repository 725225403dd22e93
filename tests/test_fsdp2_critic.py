"""A critic on two ranks is sharded like the rest and trains what one process trains."""

import os
import subprocess
import sys

import pytest
import torch

from tests.command import PATIENCE, ROOT


@pytest.fixture(scope="module")
def seen(tmp_path_factory, model_path):
    """What each of two ranks saw, and what one process saw that ran the same configuration."""
    folder = tmp_path_factory.mktemp("sharded")
    for count in (2, 1):
        command = [sys.executable, "-m", "tests.sharded_critic", str(model_path), str(folder), str(count)]
        environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
        environment |= {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return [
        torch.load(folder / name, weights_only=True) for name in ("rank0_of_2.pt", "rank1_of_2.pt", "rank0_of_1.pt")
    ]


def test_critic_and_reference_are_sharded_and_the_critic_is_one_on_both_ranks(seen):
    one, other, _ = seen
    for mine, theirs in zip(one["rows"], other["rows"], strict=True):
        assert mine["sharded"]
        assert mine["parameters"].keys() == theirs["parameters"].keys()
        assert all(torch.equal(values, theirs["parameters"][name]) for name, values in mine["parameters"].items())
        assert not [name for name in mine["engine"] if "critic" in name]
    assert one["rows"][-1]["parameters"]["critic.linear.weight"].any()
    assert one["rows"][-1]["parameters"]["critic.linear.bias"].any()


def test_updates_on_the_same_data_are_those_of_one_process(seen):
    """Both fresh epochs are one optimizer batch of the whole iteration; in the second the critic is away from 0."""
    sharded, single = seen[0]["rows"], seen[2]["rows"]
    for last in (1, 3):
        assert sharded[last]["phase"] == single[last]["phase"] == "fresh"
        torch.testing.assert_close(sharded[last]["norm"], single[last]["norm"], rtol=1e-4, atol=0)
        for name, values in single[last]["parameters"].items():
            torch.testing.assert_close(sharded[last]["parameters"][name], values, rtol=0, atol=2e-6)


def test_advantages_are_whitened_over_the_micro_batches_of_both_ranks(seen):
    for first in (0, 2, 4):
        rows = [row for rank in seen[:2] for row in rank["rows"][first : first + 2]]
        together = torch.cat([row["advantages"] for row in rows if not row["filler"]])
        assert abs(float(together.mean())) < 1e-5
        assert float(together.std(correction=0)) == pytest.approx(1.0, rel=1e-4)


def test_each_rank_writes_td_errors_back_to_its_own_buffer(seen):
    one, other, _ = (rank["bases"] for rank in seen)
    assert len(one) == len(other) == 4
    assert min(float(one.min()), float(other.min())) > 1e-4
    assert not torch.equal(one, other)
