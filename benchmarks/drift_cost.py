"""What the clock of drift costs: seconds of its measurements over seconds of the updates, for `make quickstart`'s run.

python benchmarks/drift_cost.py --model runs/quickstart/policy
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from freshper_lightning.callbacks.report import read_scalars

CONFIGS = ("base", "tasks/frozenlake", "methods/freshper", "quickstart")


def main() -> None:
    """Run a few iterations and print one line for each, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a warm-started policy")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--run", type=Path, default=Path("runs/benchmark/drift_cost"))
    options, further = parser.parse_known_args()
    settings = {
        "model.path": options.model,
        "rollout.measure_drift": "true",
        "rollout.engine.name": "transformers",
        "evaluation.at_start": "false",
        "report.enabled": "false",
        "trainer.max_epochs": options.iterations,
        "trainer.enable_checkpointing": "false",
        "trainer.logger.init_args.save_dir": options.run.parent,
        "trainer.logger.init_args.name": options.run.name,
        "trainer.logger.init_args.version": "",
    }
    shutil.rmtree(options.run, ignore_errors=True)  # its steps would count as this run's
    command = [sys.executable, "-m", "freshper_lightning", "fit"]
    command += [argument for name in CONFIGS for argument in ("-c", f"configs/{name}.yaml")]
    command += [f"--{key}={value}" for key, value in settings.items()]
    subprocess.run(command + further, check=True)
    report(options.run)


def report(run: Path) -> None:
    """Print the share that measuring has of what updates take without it."""
    scalars = read_scalars(run)
    drift, update = ([value for _, value in scalars[f"time/{name}"]] for name in ("drift", "update"))
    for measured, whole in [*zip(drift, update, strict=True), (sum(drift), sum(update))]:
        print(f"drift {measured:.3f} s, updates {whole:.2f} s: {100 * measured / (whole - measured):.1f} %")
    for name in ("drift_per_update", "drift", "drift_length", "lr_path"):
        print(f"replay/{name} {scalars[f'replay/{name}'][-1][1]:.3g}")


if __name__ == "__main__":
    main()
