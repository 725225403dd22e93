"""Warm starts and the search of learning rates, from the first command to the report."""

import csv

import pytest
from omegaconf import OmegaConf

from freshper_lightning.cli import main
from tests.command import ROOT

SMALL = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 64,
}
FILE = {
    "task": "lake",
    "stack": ["configs/base.yaml", "configs/tasks/frozenlake.yaml"],
    "warm_start": {
        "tiny": {"spec": SMALL, "episodes": 20},
        "stack": ["configs/methods/warm_start.yaml", "configs/tasks/frozenlake_warm_start.yaml"],
        "settings": {
            "data": {"init_args": {"episodes": 64}},
            "evaluation": {"episodes": 4},
            "trainer": {"max_epochs": 1},
        },
    },
    "settings": {
        "rollout": {"groups": 2, "group_size": 2, "engine": {"name": "transformers", "kv_cache_mib": 64}},
        "data": {"init_args": {"batch_size": 4}},
        "evaluation": {"episodes": 4, "every_n_iterations": 1},
        "trainer": {"max_epochs": 1},
    },
    "final_window": 1,
    "keep_checkpoints": True,
    "tuning": {"seeds": [50], "factors": [1, 3]},
    "baseline": "on_policy",
    "arms": {
        "on_policy": {"stack": ["configs/methods/on_policy.yaml"]},
        "freshper_50": {"stack": ["configs/methods/freshper.yaml"]},
    },
}


@pytest.mark.slow
def test_arms_share_a_warm_start_per_seed_and_take_the_rates_that_were_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    OmegaConf.save(OmegaConf.create(FILE), tmp_path / "lake.yaml")
    folder = tmp_path / "results"
    command = ["compare", "-c", str(tmp_path / "lake.yaml"), "--folder", str(folder), "--jobs=2"]
    main([*command, "--tune"])
    assert "lake: 4 of 4 runs to do, 1 warm starts, 2 at a time" in capsys.readouterr().out
    chosen = OmegaConf.load(folder / "learning_rates.yaml")
    assert set(chosen) == {"on_policy", "freshper_50"}
    for choice in chosen.values():
        best = max(choice.results.values())
        assert choice.learning_rate == pytest.approx(3e-4 if choice.results["1"] == best else 9e-4)
    OmegaConf.update(chosen, "freshper_50.learning_rate", 9e-4)
    OmegaConf.save(chosen, folder / "learning_rates.yaml")
    main([*command, "--seeds=1"])
    assert "lake: 2 of 2 runs to do, 1 warm starts" in capsys.readouterr().out
    other = OmegaConf.load(folder / "runs" / "on_policy" / "seed-0" / "config.yaml")
    used = OmegaConf.load(folder / "runs" / "freshper_50" / "seed-0" / "config.yaml")
    assert used.model.optimizer.init_args.lr == 9e-4
    assert used.model.path == other.model.path == str(folder / "warm_start" / "seed-0" / "policy")
    assert used.seed_everything == 0
    assert (folder / "runs" / "freshper_50" / "seed-0" / "checkpoints" / "last.ckpt").exists()
    with (folder / "evaluations.csv").open(newline="") as lines:
        first = {row["success"] for row in csv.DictReader(lines) if row["update"] == "0" and row["mode"] == "sampled"}
    assert len(first) == 1
    main([*command, "--seeds=1"])
    assert "0 of 2 runs to do, 0 warm starts" in capsys.readouterr().out
