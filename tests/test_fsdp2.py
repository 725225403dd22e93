"""Two ranks with sharded parameters train what one process trains."""

import os
import subprocess
import sys

import pytest
import torch

from freshper_lightning.algorithms.ess import ess_ratio
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.trajectory import Transcript
from tests.command import PATIENCE, ROOT
from tests.policy.transcripts import alone
from tests.sharded_run import run

RANKS = 2


def on_two_ranks(model_path, folder, draw, lost):
    """What each of two ranks saw."""
    arguments = map(str, (model_path, folder, RANKS, draw, lost))
    command = [sys.executable, "-m", "tests.sharded_run", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}_of_{RANKS}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, model_path):
    """What each of two ranks saw, and what one process saw that ran the same configuration."""
    folder = tmp_path_factory.mktemp("sharded")
    ranks = on_two_ranks(model_path, folder, "stratified", lost=-1)
    run(str(model_path), folder, 1)
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
    assert sharded["shares"]
    assert sharded["totals"] == ranks[1]["rows"][0]["totals"] == single["totals"]
    torch.testing.assert_close(sharded["norm"], single["norm"], rtol=1e-5, atol=0)
    for mine, theirs in zip(sharded["parameters"], single["parameters"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def replayed(ranks):
    """Rows of all ranks for each replay batch, and the masses of their entries."""
    for rows in zip(*(rank["rows"] for rank in ranks), strict=True):
        if rows[0]["phase"] == "replay":
            masses = [torch.tensor(list(row["masses"].values()), dtype=torch.float64) for row in rows]
            yield rows, torch.stack([one.sum() for one in masses])


def test_a_draw_of_two_ranks_has_the_probabilities_and_weights_of_one_buffer(seen):
    ranks, _ = seen
    for rows, shards in replayed(ranks):
        whole = float(shards.sum())
        shares = [
            torch.tensor([row["masses"][key] / whole for key in row["ids"].tolist()], dtype=torch.float64)
            for row in rows
        ]
        rarest = min(float(share.min()) for share in shares)
        # The clock had moved on by one update when the row was written.
        beta = rows[0]["beta"] - 0.6 / 20
        for row, share, shard in zip(rows, shares, shards, strict=True):
            torch.testing.assert_close(row["probabilities"], share, rtol=1e-9, atol=0)
            expected = (rarest / share) ** beta * RANKS * shard / whole
            torch.testing.assert_close(row["weights"].double(), expected, rtol=1e-6, atol=0)
        assert rows[0]["effective"] == rows[1]["effective"] > 4


def test_ranks_draw_with_seeds_of_their_own(seen):
    """Both buffers hold ids from 0 on; with one seed and like masses they would draw the same places."""
    ranks, _ = seen
    assert [rows[0]["ids"].tolist() for rows, _ in replayed(ranks)] != [
        rows[1]["ids"].tolist() for rows, _ in replayed(ranks)
    ]


@pytest.mark.parametrize("draw", ["stratified", "gumbel"])
def test_a_rank_whose_shard_is_empty_goes_along_and_the_others_carry_the_batch(tmp_path, model_path, draw):
    ranks = on_two_ranks(model_path, tmp_path, draw, lost=1)
    for rank in ranks:
        assert rank["updates"] == 6
    for one, other in zip(*(rank["rows"] for rank in ranks), strict=True):
        assert all(map(torch.equal, one["parameters"], other["parameters"]))
        assert (len(one["ids"]), len(other["ids"])) == (4, 0)
    for (full, empty), _ in replayed(ranks):
        assert full["norm"] > 0
        assert full["totals"] == empty["totals"]
        assert full["totals"][1] == 8  # trajectories that were asked for
        if draw == "stratified":
            share = full["probabilities"]
            beta = full["beta"] - 0.6 / 20
            torch.testing.assert_close(full["weights"].double(), 2 * (share.min() / share) ** beta, rtol=1e-6, atol=0)
            assert full["totals"][0] == pytest.approx(2 * full["tokens"])


def test_drift_is_the_mean_over_the_probes_of_all_ranks(seen, model_path):
    """From the whole policy after each update: weights that one rank had kept from before it would show."""
    ranks, _ = seen
    net, former = PolicyNet.from_pretrained(model_path), 0.0
    for rows in zip(*(rank["rows"] for rank in ranks), strict=True):
        probe = [Transcript(*parts) for row in rows for parts in row["probe"]]
        assert len({row["drift"] for row in rows}) == 1
        before = torch.cat([alone(net, item)[0] for item in probe])
        with torch.no_grad():
            for mine, parameter in zip(net.parameters(), rows[0]["parameters"], strict=True):
                mine.copy_(parameter)
        ratio = (torch.cat([alone(net, item)[0] for item in probe]) - before).exp()
        assert rows[0]["drift"] - former == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-2)
        former = rows[0]["drift"]
    assert former > 0


def test_the_guard_decides_on_the_weights_of_all_ranks(seen):
    ranks, _ = seen
    for rows in zip(*(rank["rows"] for rank in ranks), strict=True):
        ratio = ess_ratio(torch.cat([row["log_weights"] for row in rows]))
        expected = 1.0 if rows[0]["phase"] == "fresh" else ratio**0.5
        assert [row["factor"] for row in rows] == pytest.approx([expected] * RANKS, rel=1e-9)
    assert min(row["factor"] for row in ranks[0]["rows"]) < 1


def test_what_the_log_says_of_the_buffer_is_of_all_ranks(seen):
    ranks, _ = seen
    together = {name: sum(rank["held"][name] for rank in ranks) for name in ranks[0]["held"]}
    assert [together[name] for name in ("size", "evicted", "pinned")] == [16, 0, 8]
    together["age_buffer"] /= together["size"]
    assert {name: points[-1][1] for name, points in ranks[0]["logged"].items()} == pytest.approx(together)
