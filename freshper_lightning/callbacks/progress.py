"""Progress on a terminal: one bar for the rollout and one for the updates; plain lines where output is a file."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class LoopProgress(TQDMProgressBar):
    """Bars on a terminal, and every ``line_every`` iterations a line where output goes to a file."""

    BAR_FORMAT = "{l_bar}{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    FIRST = ("success", "return")

    def __init__(self, line_every: int = 10) -> None:
        """Keep the interval of the lines, in iterations."""
        super().__init__(refresh_rate=1)
        if line_every < 1:
            raise ValueError(f"progress.line_every={line_every} must be at least 1")
        self.line_every = line_every
        self._terminal = sys.stdout.isatty() and shutil.get_terminal_size((0, 0)).columns > 0

    @property
    def is_disabled(self) -> bool:
        """Whether no bars are drawn."""
        return not (self.is_enabled and self._terminal)

    @contextmanager
    def phase(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for one rollout or evaluation; the yielded callable takes how many episodes have finished since."""
        bar = Tqdm(desc=description, total=total, disable=self.is_disabled, leave=False, position=1, dynamic_ncols=True)
        try:
            yield lambda finished: bar.update(finished) and None
        finally:
            bar.close()

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Name the updates' bar after the iteration."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(f"Iteration {trainer.current_epoch + 1}/{trainer.max_epochs}, updates")

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Logged values without the version number of the logger, what is watched most ahead of the rest."""
        metrics = {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}
        return {k: metrics.pop(k) for k in self.FIRST if k in metrics} | metrics

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a line where there is no bar."""
        super().on_train_epoch_end(trainer, pl_module)
        iteration = trainer.current_epoch + 1
        if self._terminal or not self.is_enabled or (iteration % self.line_every and iteration != trainer.max_epochs):
            return
        values = self.get_metrics(trainer, pl_module).items()
        shown = "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in values)
        print(f"iteration {iteration}/{trainer.max_epochs}  {shown}", flush=True)
