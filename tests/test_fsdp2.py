"""Two ranks with sharded parameters train what one process trains."""

import os
import subprocess
import sys

import pytest
import torch

from freshper_lightning.algorithms.ess import ess_ratio
from tests.command import ROOT
from tests.sharded_run import run

RANKS = 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory, model_path):
    """What each of two ranks saw, and what one process saw that ran the same configuration."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "tests.sharded_run", str(model_path), str(folder), str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run(str(model_path), folder, 1)
    ranks = [torch.load(folder / f"rank{rank}_of_{RANKS}.pt", weights_only=True) for rank in range(RANKS)]
    return ranks, torch.load(folder / "rank0_of_1.pt", weights_only=True)


def test_two_ranks_finish_two_iterations_of_fresh_and_replayed_data(seen):
    ranks, alone = seen
    for rank in ranks:
        assert rank["sharded"]
        assert [row["phase"] for row in rank["rows"]] == ["fresh", "replay", "replay"] * 2
        assert rank["updates"] == alone["updates"] == 6
        assert all(torch.isfinite(row["loss"]) for row in rank["rows"])
    assert ranks[0]["steps"] == ranks[1]["steps"]


def test_groups_stay_whole_and_are_split_between_ranks(seen):
    ranks, alone = seen
    assert [rank["groups"] for rank in ranks] == [[0] * 4 + [2] * 4, [1] * 4 + [3] * 4]
    assert alone["groups"] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_parameters_are_one_policy_on_both_ranks(seen):
    (one, other), _ = seen
    for mine, theirs in zip(one["rows"], other["rows"], strict=True):
        assert mine["norm"] > 0
        assert torch.equal(mine["norm"], theirs["norm"])
        assert all(map(torch.equal, mine["parameters"], theirs["parameters"]))
    first, last = one["rows"][0]["parameters"], one["rows"][-1]["parameters"]
    assert not any(map(torch.equal, first, last))


def test_an_update_on_the_same_data_is_that_of_one_process(seen, model_path):
    """The first fresh batch is the whole iteration, so that both runs train on the same data in it."""
    ranks, alone = seen
    assert [sorted(rank["rows"][0]["ids"].tolist()) for rank in ranks] == [[0, 1, 2, 3]] * 2, (
        "ids are of each rank's buffer"
    )
    assert sorted(alone["rows"][0]["ids"].tolist()) == list(range(8))
    sharded, single = ranks[0]["rows"][0], alone["rows"][0]
    assert sharded["totals"] == ranks[1]["rows"][0]["totals"] == single["totals"]
    torch.testing.assert_close(sharded["norm"], single["norm"], rtol=1e-5, atol=0)
    for mine, theirs in zip(sharded["parameters"], single["parameters"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_weights_of_a_draw_are_relative_to_the_rarest_of_all_ranks(seen):
    ranks, _ = seen
    for rows in zip(*(rank["rows"] for rank in ranks), strict=True):
        if rows[0]["phase"] == "fresh":
            continue
        rarest = min(float(row["probabilities"].min()) for row in rows)
        for row in rows:
            # The clock had moved on by one update when the row was written.
            beta = row["beta"] - 0.6 / 20
            expected = (rarest / row["probabilities"]) ** beta
            torch.testing.assert_close(row["weights"].double(), expected, rtol=1e-6, atol=0)


def test_the_guard_decides_on_the_weights_of_all_ranks(seen):
    ranks, _ = seen
    for rows in zip(*(rank["rows"] for rank in ranks), strict=True):
        ratio = ess_ratio(torch.cat([row["log_weights"] for row in rows]))
        expected = 1.0 if rows[0]["phase"] == "fresh" else ratio**0.5
        assert [row["factor"] for row in rows] == pytest.approx([expected] * RANKS, rel=1e-9)
    assert min(row["factor"] for row in ranks[0]["rows"]) < 1
