"""Runs `make quickstart` or `make learn` for several seeds and writes one row each; finished seeds are kept.

python benchmarks/learning.py quickstart --seeds 0 1 2 3 4
python benchmarks/learning.py quickstart --engine vllm --seeds 0 1
python benchmarks/learning.py learn --seeds 0
"""

import argparse
import csv
import os
import platform
import subprocess
import time
from pathlib import Path

from freshper_lightning.callbacks.report import read_scalars

FIELDS = ("target", "engine", "seed", "sampled_before", "sampled_after", "greedy_before", "greedy_after", "gain")
COSTS = ("environment_steps", "optimizer_steps", "share_replayed", "minutes", "cores", "machine")


def main() -> None:
    """Run what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("quickstart", "learn"))
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--table", type=Path, default=Path("docs/results/learning.csv"))
    options = parser.parse_args()
    rows = _read(options.table)
    for seed in options.seeds:
        key = (options.target, options.engine, str(seed))
        if any((row["target"], row["engine"], row["seed"]) == key for row in rows):
            print(f"{' '.join(key)}: in {options.table} already")
            continue
        rows.append(_run(*key))
        _write(options.table, rows)
        print(rows[-1], flush=True)


def _run(target: str, engine: str, seed: str) -> dict[str, str]:
    run = f"runs/benchmark/{target}-{engine}-{seed}"
    start = time.monotonic()
    subprocess.run(["make", target, f"SEED={seed}", f"ENGINE={engine}", f"RUN={run}"], check=True)
    minutes = (time.monotonic() - start) / 60
    scalars = read_scalars(Path(run) / "freshper")
    sampled, greedy = (scalars[f"evaluation/{mode}/success"] for mode in ("sampled", "greedy"))
    return {
        "target": target,
        "engine": engine,
        "seed": seed,
        "sampled_before": f"{sampled[0][1]:.4f}",
        "sampled_after": f"{sampled[-1][1]:.4f}",
        "greedy_before": f"{greedy[0][1]:.4f}",
        "greedy_after": f"{greedy[-1][1]:.4f}",
        "gain": f"{sampled[-1][1] - sampled[0][1]:.4f}",
        "environment_steps": f"{scalars['rollout/environment_steps'][-1][1]:.0f}",
        "optimizer_steps": str(sampled[-1][0]),
        "share_replayed": f"{scalars['replay/share_of_training'][-1][1]:.3f}",
        "minutes": f"{minutes:.1f}",
        "cores": str(os.cpu_count()),
        "machine": platform.machine(),
    }


def _read(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(table: Path, rows: list[dict[str, str]]) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    temporary = table.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS + COSTS)
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(table)


if __name__ == "__main__":
    main()
