"""What a run was started with, beside its logs."""

import itertools
from pathlib import Path

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

CONFIG = "config.yaml"


class SaveRunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` in the folder of the logs once training begins: the run, without what it resumes from.

    A file of another content that is there already is kept under a name with a number. ``validate`` and ``test``,
    which may log into the folder of a run, save ``validate.yaml`` and ``test.yaml``. Where a logger has no folder of
    its own, ``config.yaml`` is beside the folder of checkpoints; without any logger there is no file.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing: what is refused later on has changed no file."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is trained with; a checkpoint has been restored by now."""
        self._write(trainer, CONFIG)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is validated with."""
        self._write(trainer, "validate.yaml")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is tested with."""
        self._write(trainer, "test.yaml")

    def _write(self, trainer: Trainer, name: str) -> None:
        folder = _folder(trainer)
        if folder is None or not trainer.is_global_zero:
            return
        config = self.config.clone()
        if name == CONFIG and "ckpt_path" in config:
            config["ckpt_path"] = None
        path, content = folder / name, self.parser.dump(config, skip_unset=False)
        if path.exists():
            if path.read_text() == content:
                return
            path.rename(_unused(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _folder(trainer: Trainer) -> Path | None:
    logs, checkpoints = getattr(trainer.logger, "log_dir", None), getattr(trainer.checkpoint_callback, "dirpath", None)
    if logs is not None:
        return Path(logs)
    return Path(checkpoints).parent if trainer.loggers and checkpoints is not None else None


def _unused(path: Path) -> Path:
    """``config.1.yaml``, or the first with a number that is not there."""
    numbered = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
    return next(one for one in numbered if not one.exists())
