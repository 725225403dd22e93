"""The study of one seed: train with snapshots, then measure each of them against the frozen probe."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import LAST, read_file
from freshper_lightning.cli import lightning_cli
from freshper_lightning.exclusive import exclusive
from freshper_lightning.policy.net import require_model_folder
from freshper_lightning.study import report, table
from freshper_lightning.study.episodes import HeldOutPlay
from freshper_lightning.study.measure import Study
from freshper_lightning.study.picture import draw
from freshper_lightning.study.snapshots import PolicySnapshots, check_updates, snapshot

SNAPSHOTS = "snapshots"
"""Where in a run's folder they are."""


def staleness(
    *,
    policy: str,
    run: Path,
    seed: int,
    options: Sequence[str],
    ages: Sequence[int],
    groups: int,
    results: Path,
    picture: Path,
    train: Callable[[Sequence[str]], None],
    code: str,
    variant: str = "",
    draws: int = 1000,
) -> None:
    """Measure how the gradient of each loss on stale trajectories turns away from the fresh one, by age.

    The policy samples a probe, which is never trained on, and is then trained as the options say. At each age the
    losses' gradients on the probe are set against that of fresh episodes. Ages that the results have already are kept,
    and training goes on where it was stopped.

    Args:
        policy: Folder of the policy that training starts from.
        run: Folder for checkpoints and snapshots of this seed.
        seed: Of training, probe and fresh episodes.
        options: Of `freshper fit`: what is trained, on what, and how.
        ages: Applied updates after which the policy is measured.
        groups: Groups of the probe; as many make each of the two halves of the fresh episodes.
        results: CSV file of all tasks and seeds; a file of the same name that ends in .md gets its tables.
        picture: PNG of what the results hold.
        train: Runs `freshper` with the arguments that it is given; ages that it does not reach are not measured.
        code: Which code trains and measures.
        variant: What the options change of the arm that is studied, in words; of a variant only what the policy moves
            by is measured.
        draws: Bootstrap samples for intervals.

    Raises:
        ValueError: Ages, groups or draws cannot be.
        ConfigurationError: The options do not parse, or there is no policy.
    """
    _check(policy, ages, groups, draws)
    arguments = _arguments(options, policy, run, seed, ages)
    folder = run / SNAPSHOTS
    missing = [age for age in ages if not snapshot(folder, age).exists()]
    if missing:
        train(["fit", *arguments, *_resumption(run, missing)])
    cli = lightning_cli(arguments, run=False)
    rollout = callback_of(cli.trainer, RolloutCallback)
    environment = callback_of(cli.trainer, EvaluationCallback).environment or rollout.environment
    how = HeldOutPlay(rollout, environment)
    study = Study(how, Path(policy), seed, groups, draws, cli.trainer.strategy.root_device)
    reached = [age for age in ages if snapshot(folder, age).exists()]
    keys = [table.Key(environment.id, seed, age, variant) for age in reached]
    _measure(study, folder, keys, results, code)
    if rows := table.read(results):
        results.with_suffix(".md").write_text(report.page(rows))
        draw(rows, picture)


def _check(policy: str, ages: Sequence[int], groups: int, draws: int) -> None:
    check_updates("ages", ages)
    for key, value, least in (("groups", groups, 2), ("draws", draws, 1)):
        if value < least:
            raise ValueError(f"{key}={value} must be at least {least}")
    require_model_folder(policy)


def _arguments(options: Sequence[str], policy: str, run: Path, seed: int, ages: Sequence[int]) -> list[str]:
    """Of the run that is studied; how well it does is seen from fresh episodes instead of evaluations."""
    settings = {
        "seed_everything": seed,
        "model.path": policy,
        "evaluation.at_start": "false",
        "evaluation.episodes": 1,
        "evaluation.every_n_iterations": "null",
        "report.enabled": "false",
        "trainer.max_epochs": -1,
        "trainer.logger.init_args.save_dir": run,
        "trainer.logger.init_args.name": "train",
        "trainer.logger.init_args.version": "",
        "trainer.callbacks+": f"{PolicySnapshots.__module__}.{PolicySnapshots.__name__}",
        "trainer.callbacks.folder": run / SNAPSHOTS,
        "trainer.callbacks.updates": list(ages),
    }
    return [*options, *(f"--{key}={value}" for key, value in settings.items())]


def _resumption(run: Path, missing: Sequence[int]) -> list[str]:
    """From the last checkpoint, unless it is past a snapshot that is missing."""
    last = run / "train" / "checkpoints" / LAST
    behind = last.exists() and _updates_of(last) <= min(missing)
    return [f"--ckpt_path={last}"] if behind else []


def _updates_of(checkpoint: Path) -> int:
    return int(read_file(checkpoint, "cpu")["callbacks"][RolloutCallback.__name__]["updates"])


def _measure(study: Study, folder: Path, keys: Sequence[table.Key], results: Path, code: str) -> None:
    missing = [key for key in keys if not table.has(table.read(results), key)]
    probe = study.probe() if missing else []
    for number, key in enumerate(missing, 1):
        start = time.perf_counter()
        rows = [replace(row, code=code) for row in study.rows(key, snapshot(folder, key.age), probe)]
        with exclusive(results):
            table.write(results, [*table.read(results), *rows])
        seconds, left = time.perf_counter() - start, len(missing) - number
        of = f", {key.variant}" if key.variant else ""
        print(f"seed {key.seed}{of}, age {key.age}: {seconds:.0f} s, {left} ages left", flush=True)
