"""An iteration of this project's trainer beside one of TRL's GRPOTrainer: seconds, tokens per second, peak memory.

`python -m benchmarks.trainer` runs what its table lacks, keeps the rest, writes the tables into the page and says which
targets are met. It can be stopped and started. `make bench-trainer` makes the environments and the model that it needs.
Each run has a process of its own; trainers alternate, repetition by repetition.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import rows
from benchmarks.machine import processor, same_commit
from benchmarks.trainer import page, task
from benchmarks.trainer.cases import ENGINES, TRL, Case, cases
from benchmarks.trainer.ragged import sample
from benchmarks.trainer.results import Results, Row
from benchmarks.trainer.targets import SMOLLM2, TINY, targets
from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from freshper_lightning.rollout.seeds import training_instance_seed

ITERATIONS = {TINY: 11, SMOLLM2: 2}
"""By model, with the first, which does not count."""
GROUPS, GROUP_SIZE, NEW_TOKENS, LONGEST = 4, 8, 64, 128
"""Shape of an iteration, and the longest of the completions of different lengths."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and report everything."""
    options = _options(arguments)
    runs = [
        (model, case, repetition)
        for repetition in range(options.repetitions)
        for model in options.models
        for case in cases()
        if case.kind in options.kinds and case.precision in options.precisions
    ]
    measured = rows.read(options.table, Row)
    missing = [run for run in runs if not Results(measured).has(*run)]
    _require(missing, options)
    for model, case, repetition in missing:
        measured.append(_measured(model, case, repetition, options))
        rows.write(options.table, measured)
        print(f"{model}, {case}: {measured[-1].seconds:.2f} s, {measured[-1].peak_mib:.0f} MiB", flush=True)
    results = Results(measured)
    print("\n\n".join(page.put_into(options.page, results, targets(results)).values()))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(TINY, SMOLLM2), default=(TINY, SMOLLM2))
    parser.add_argument("--kinds", nargs="+", choices=("whole", "ragged"), default=("whole", "ragged"))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="of each run, the first of which does not count")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of a completion")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens where lengths differ")
    parser.add_argument("--groups", type=int, default=GROUPS, help="prompts of an iteration")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl", default=".venv-trl/bin/python", help="Python of the environment that has TRL")
    parser.add_argument("--smollm2", type=Path, default=Path("runs/smollm2"), help="where `make smollm2` put the model")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_trainer"), help="for files of its own")
    parser.add_argument("--table", type=Path, default=Path("docs/results/trainer.csv"))
    parser.add_argument("--page", type=Path, default=Path("docs/trainer.md"), help="where the tables are put")
    options = parser.parse_args(arguments)
    rows.require_own_table(options, parser, "iterations", "new_tokens", "longest", "groups", "threads", "seed")
    return options


def _require(runs: Sequence[tuple[str, Case, int]], options: argparse.Namespace) -> None:
    """What the runs need, ahead of the first of them."""
    if any(case.trainer == TRL for _, case, _ in runs) and not Path(options.trl).exists():
        raise SystemExit(f"--trl={options.trl} is not there; `make bench-trainer` makes it")
    if any(model == SMOLLM2 for model, _, _ in runs) and not (options.smollm2 / "config.json").exists():
        raise SystemExit(f"--smollm2={options.smollm2} holds no model; `make smollm2` makes one")


def _measured(model: str, case: Case, repetition: int, options: argparse.Namespace) -> Row:
    job = _job(model, case, options)
    load = os.getloadavg()[0]
    with same_commit() as measured:
        outcome = _in_another_process(job, options)
    middle = outcome.middle()
    return Row(
        model=model,
        kind=case.kind,
        trainer=case.trainer,
        precision=case.precision,
        micro_batches=case.micro_batches,
        checkpointing=case.checkpointing,
        repetition=repetition,
        iterations=job.iterations - 1,
        seconds=round(middle.seconds, 4),
        generation=round(middle.generation, 4),
        training=round(middle.training, 4),
        prompt_tokens=middle.prompt_tokens,
        completion_tokens=middle.completion_tokens,
        peak_mib=round(outcome.peak_mib, 1),
        start_mib=round(outcome.start_mib, 1),
        threads=options.threads,
        load=round(load, 2),
        seed=job.seed,
        commit=measured(),
        versions=outcome.versions,
        machine=f"{os.cpu_count()} x {processor()}",
    )


def _job(model: str, case: Case, options: argparse.Namespace) -> task.Job:
    iterations, seed = options.iterations or ITERATIONS[model], options.seed
    seeds = [training_instance_seed(seed, i + 1, group) for i in range(iterations) for group in range(options.groups)]
    job = task.Job(
        model=str(_folder(model, options)),
        engine=ENGINES[case.trainer],
        precision=case.precision,
        micro_batches=case.micro_batches,
        checkpointing=case.checkpointing,
        groups=options.groups,
        group_size=GROUP_SIZE,
        new_tokens=options.new_tokens if case.kind == "whole" else options.longest,
        iterations=iterations,
        seed=seed,
        prompts=[task.prompt(one) for one in seeds],
    )
    return job if case.kind == "whole" else replace(job, ragged=_ragged(model, job, options))


def _folder(model: str, options: argparse.Namespace) -> Path:
    if model == SMOLLM2:
        return Path(options.smollm2)
    folder = Path(options.folder) / "tiny"
    if not (folder / "config.json").exists():
        build_tiny(folder, TinySpec(), byte_tokenizer())
    return folder


def _ragged(model: str, job: task.Job, options: argparse.Namespace) -> task.Ragged:
    """Sampled at the first call, and then read: every trainer gets the same."""
    path = Path(options.folder) / f"{model}-{job.iterations}-{job.groups}-{options.longest}-{job.seed}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        task.write(replace(job, ragged=sample(job, options.longest)), path)
    ragged = task.read_job(path).ragged
    assert ragged is not None
    return ragged


def _in_another_process(job: task.Job, options: argparse.Namespace) -> task.Outcome:
    peer = job.engine == ENGINES[TRL]
    python, module = (options.trl, "trl_peer") if peer else (sys.executable, "ours")
    with tempfile.TemporaryDirectory() as folder:
        job_file, outcome = Path(folder) / "job.json", Path(folder) / "outcome.json"
        task.write(job, job_file)
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        command = [python, "-m", f"benchmarks.trainer.{module}", str(job_file), str(outcome)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return task.read_outcome(outcome)


if __name__ == "__main__":
    main()
