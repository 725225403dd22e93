"""Writes the policy out at set ages of a run, so that each of them can be measured apart and later."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from freshper_lightning.callbacks.parts import callback_of, policy_module
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.policy.export import export_policy


class PolicySnapshots(Callback):
    """After so many applied updates the policy is in a Hugging Face folder of that name.

    Training ends with the iteration of the last one: a checkpoint of half an iteration would be taken for one of a
    whole, and a longer study could not go on from it. A folder is whole or not there, and one that is there is kept: a
    resumed run passes the same policies again.
    """

    def __init__(self, folder: str, updates: list[int]) -> None:
        """Keep the settings.

        Args:
            folder: Where the snapshots go; see :func:`snapshot`.
            updates: Applied updates after which one is written; 0 is the policy that the run starts from.
        """
        check_updates("updates", updates)
        self.folder, self.updates = folder, updates

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the policy that the run starts from, or resumes from."""
        self._write(trainer, pl_module)
        self._stop_after_the_last(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the policy where its time has come."""
        self._write(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop where nothing is left to write."""
        self._stop_after_the_last(trainer)

    def _stop_after_the_last(self, trainer: Trainer) -> None:
        if callback_of(trainer, RolloutCallback).clock.updates >= max(self.updates):
            trainer.should_stop = True

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        done = callback_of(trainer, RolloutCallback).clock.updates
        path = snapshot(self.folder, done)
        if done in self.updates and trainer.is_global_zero and not path.exists():
            module = policy_module(pl_module)
            torn = path.with_suffix(".torn")
            shutil.rmtree(torn, ignore_errors=True)
            export_policy(module.policy, module.path, torn)
            torn.rename(path)


def snapshot(folder: str | Path, updates: int) -> Path:
    """The folder of the policy after so many applied updates."""
    return Path(folder) / f"updates_{updates:06d}"


def check_updates(key: str, updates: Sequence[int]) -> None:
    """Refuse ages that are none.

    Raises:
        ValueError: There is no age, one below 0, or they do not increase.
    """
    if not updates or min(updates) < 0 or sorted(set(updates)) != list(updates):
        raise ValueError(f"{key}={list(updates)} must be applied updates, at least 0 and increasing")
