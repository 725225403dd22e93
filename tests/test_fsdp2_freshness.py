"""Two ranks hold out different trajectories and agree about tau."""

import os
import subprocess
import sys

import pytest
import torch

from tests.command import PATIENCE, ROOT
from tests.sharded_freshness import RANKS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, model_path):
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "tests.sharded_freshness", str(model_path), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_every_rank_holds_out_its_share_and_knows_what_all_have_seen(ranks):
    one, other = ranks
    assert len(one["held_out"]) == len(other["held_out"]) == 3 * 2
    assert not set(one["held_out"]) & set(other["held_out"])
    assert len(one["observed"]["held_out"]) == 4 + 8 + 8
    assert torch.equal(one["observed"]["held_out"], other["observed"]["held_out"])


def test_a_probe_leaves_no_weights_gathered(ranks):
    assert [rank["sharded"] for rank in ranks] == [[True] * 3] * 2


def test_tau_is_one_number_on_all_ranks(ranks):
    assert ranks[0]["tau"] == ranks[1]["tau"] != 5.0


def test_every_rank_writes_back_to_its_own_buffer(ranks):
    one, other = (rank["log_fresh"] for rank in ranks)
    assert one.min() < -1e-4
    assert other.min() < -1e-4
    assert not torch.equal(one, other)
