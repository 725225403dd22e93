"""The study as one command: train with snapshots, then measure each of them against the frozen probe."""

import time
from collections.abc import Sequence
from pathlib import Path

from freshper_lightning.callbacks.parts import callback_of
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import LAST, read_file
from freshper_lightning.cli import FreshperCLI, lightning_cli
from freshper_lightning.policy.net import require_model_folder
from freshper_lightning.study import report, table
from freshper_lightning.study.measure import Study
from freshper_lightning.study.picture import draw
from freshper_lightning.study.snapshots import PolicySnapshots, check_updates, snapshot

AGES = (0, 6, 12, 24, 48, 96, 192)


def staleness(
    configs: Sequence[str],
    policy: str,
    run: str,
    seed: int = 0,
    options: Sequence[str] = (),
    ages: Sequence[int] = AGES,
    groups: int = 64,
    draws: int = 1000,
    results: str = "docs/results/staleness.csv",
    picture: str = "docs/images/staleness.png",
) -> None:
    """Measure how the gradient of each loss on stale trajectories turns away from the fresh one, by age.

    The policy samples a probe, which is never trained on, and is then trained as the configs say. At each age the
    losses' gradients on the probe are set against that of fresh episodes. Ages that the results have already are kept,
    and training goes on where it was stopped.

    Args:
        configs: Files of `freshper fit`: what is trained, on what, and how.
        policy: Folder of the policy that training starts from.
        run: Folder for checkpoints and snapshots of this seed.
        seed: Of training, probe and fresh episodes.
        options: Further options of `freshper fit`, such as ``--rollout.engine.name=transformers``.
        ages: Applied updates after which the policy is measured.
        groups: Groups of the probe; as many make each of the two halves of the fresh episodes.
        draws: Bootstrap samples for intervals.
        results: CSV file of all tasks and seeds; a file of the same name that ends in .md gets its tables.
        picture: PNG of what the results hold.
    """
    _check(policy, ages, groups, draws)
    cli = _parts(configs, options, policy, run, seed, ages)
    folder = Path(run) / "snapshots"
    missing = [age for age in ages if not snapshot(folder, age).exists()]
    if missing:
        _train(cli, Path(run), missing)
    rollout = callback_of(cli.trainer, RolloutCallback)
    study = Study(rollout, Path(policy), seed, groups, draws, cli.trainer.strategy.root_device)
    _measure(study, folder, ages, Path(results))
    rows = table.read(results)
    draw(rows, Path(picture))
    Path(results).with_suffix(".md").write_text(report.page(rows))


def _check(policy: str, ages: Sequence[int], groups: int, draws: int) -> None:
    check_updates("ages", ages)
    for key, value, least in (("groups", groups, 2), ("draws", draws, 1)):
        if value < least:
            raise ValueError(f"{key}={value} must be at least {least}")
    require_model_folder(policy)


def _parts(
    configs: Sequence[str], options: Sequence[str], policy: str, run: str, seed: int, ages: Sequence[int]
) -> FreshperCLI:
    """The parts of the run that is studied; how well it does is seen from fresh episodes instead of evaluations."""
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
        "trainer.callbacks.folder": Path(run) / "snapshots",
        "trainer.callbacks.updates": list(ages),
    }
    files = [part for config in configs for part in ("-c", config)]
    return lightning_cli([*files, *options, *(f"--{key}={value}" for key, value in settings.items())], run=False)


def _train(cli: FreshperCLI, run: Path, missing: Sequence[int]) -> None:
    """Go on from the last checkpoint, or anew where it is past a snapshot that is missing."""
    last = run / "train" / "checkpoints" / LAST
    behind = last.exists() and _updates_of(last) <= min(missing)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=last if behind else None)


def _updates_of(checkpoint: Path) -> int:
    return int(read_file(checkpoint, "cpu")["callbacks"][RolloutCallback.__name__]["updates"])


def _measure(study: Study, folder: Path, ages: Sequence[int], results: Path) -> None:
    keys = [table.Key(study.rollout.environment.id, study.seed, age) for age in ages]
    missing = [key for key in keys if not table.has(table.read(results), key)]
    probe = study.probe() if missing else []
    for key in missing:
        start = time.perf_counter()
        rows = study.rows(key, snapshot(folder, key.age), probe)
        table.write(results, [*table.read(results), *rows])  # read again, since another seed may have been written
        print(f"{key}: {time.perf_counter() - start:.0f} s", flush=True)
