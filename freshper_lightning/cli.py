"""`freshper`: LightningCLI for fit, validate and test, and a few commands around it."""

import itertools
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import transformers
from lightning import Callback, LightningDataModule, Trainer
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf.errors import OmegaConfBaseException

from datamodules.demonstrations import DemonstrationsDataModule
from datamodules.replay import ReplayDataModule
from freshper_lightning import commands
from freshper_lightning.callbacks.checks import check_checkpoint
from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.freshness import FreshnessCallback
from freshper_lightning.callbacks.progress import LoopProgress
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.report import Report
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import ReplayCheckpointIO
from freshper_lightning.cli_parser import FreshperParser, refusal
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.saved_config import SaveRunConfig
from freshper_lightning.strategies import FSDP2Strategy

__all__ = ["DemonstrationsDataModule", "FSDP2Strategy", "FreshperCLI", "ReplayDataModule", "main"]

COMMANDS: dict[str, Callable[..., Any]] = {
    "encyclopedia": commands.encyclopedia,
    "export": commands.export,
    "index": commands.index,
    "inspect": commands.inspect,
    "smollm2": commands.smollm2,
    "tiny": commands.tiny,
}
"""Subcommands beside those of LightningCLI, but for `compare`, whose options are a parser's of its own."""

COMPARE = "compare"
NAMES = ", ".join(sorted([COMPARE, *COMMANDS]))

MAIN_PARSER = {
    "prog": "freshper",
    "env_prefix": "FRESHPER",
    "description": f"Train and evaluate; further commands with a --help of their own: {NAMES}.",
}

HINTS = (
    "does not have many workers",
    "`val_dataloader`",
    "length of `list` across ranks is zero",
    "sync_dist=True",
    "LeafSpec",
    "litlogger",
    "args parameter is intended to run from within Python",
    "dirpath has changed",
    "`Trainer.fit` stopped",
)
"""Parts of warnings of Lightning's about what is done here on purpose."""


class FreshperCLI(LightningCLI):
    """Every part of a run is one group of keys: model, data, rollout, freshness, evaluation, report and so on."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The methods of Trainer that are offered, and the arguments of theirs that are not."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
            "validate": {"model", "dataloaders", "datamodule", "weights_only"},
            "test": {"model", "dataloaders", "datamodule", "weights_only"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks that every run has, and tie together what must be equal."""
        parser.add_lightning_class_args(RolloutCallback, "rollout")
        parser.add_lightning_class_args(FreshnessCallback, "freshness")
        parser.add_lightning_class_args(ReplayMonitor, "monitor")
        parser.add_lightning_class_args(EvaluationCallback, "evaluation")
        parser.add_lightning_class_args(LoopProgress, "progress")
        parser.add_lightning_class_args(Report, "report")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_on_train_epoch_end": True})
        parser.link_arguments("seed_everything", "rollout.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "freshness.seed", compute_fn=int)
        parser.link_arguments("rollout.sampling.temperature", "model.temperature")
        parser.link_arguments("rollout.history", "data.init_args.history")

    def instantiate_classes(self) -> None:
        """Make the parts; a value that a part refuses ends the command with the part's own sentence."""
        path = self._get(self.config, "ckpt_path")
        if path is not None and not Path(path).exists():
            raise ConfigurationError(f"ckpt_path={path!r} is not there")
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            raise ConfigurationError(refusal(str(error))) from error
        if path is not None:
            check_checkpoint(self.trainer, path, fitting=self.subcommand == "fit")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer; checkpoints are written by ReplayCheckpointIO unless the user names another plugin.

        Under SLURM nothing is saved and requeued by Lightning, whose handler of its signal would do so inside of an
        update and put a file into the current folder that every later job there would start from.
        """
        plugins = self._get(self.config_init, "trainer").get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins = [*plugins, ReplayCheckpointIO()]
        launched = TorchElasticEnvironment.detect() or any(isinstance(p, ClusterEnvironment) for p in plugins)
        if SLURMEnvironment.detect() and not launched:
            plugins = [*plugins, SLURMEnvironment(auto_requeue=False)]
        return super().instantiate_trainer(plugins=plugins, **kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        own = config.get("callbacks") or []
        own = own if isinstance(own, list) else [own]
        unwanted: list[type] = []
        if config.get("enable_progress_bar") is False:
            unwanted.append(ProgressBar)
        if config.get("enable_checkpointing") is False:
            unwanted.append(ModelCheckpoint)
        wanted = [callback for callback in callbacks if not isinstance(callback, tuple(unwanted))]
        # The user's own come last, and so see the clock of an update and the evaluation that follows it.
        return super()._instantiate_trainer({**config, "callbacks": None}, [*wanted, *own])


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` (the process's own by default)."""
    arguments = sys.argv[1:] if args is None else list(args)
    sys.path.insert(0, str(Path.cwd()))  # environments and other classes of the user's own
    quiet()
    try:
        if arguments and arguments[0] == COMPARE:
            commands.compare(arguments[1:])
        elif arguments and arguments[0] in COMMANDS:
            _run_command(*arguments)
        else:
            _run_lightning(None if args is None else arguments)
    except (ConfigurationError, MisconfigurationException, OmegaConfBaseException) as error:
        sys.exit(f"freshper: error: {error}")


def _run_command(name: str, *options: str) -> None:
    command = COMMANDS[name]
    parser = jsonargparse.ArgumentParser(prog=f"freshper {name}", description=str(command.__doc__).partition("\n")[0])
    parser.add_function_arguments(command, as_group=False)
    try:
        command(**parser.instantiate(parser.parse_args(_with_lists(options))).as_dict())
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error


def _with_lists(options: Sequence[str]) -> list[str]:
    """The options, where several values behind a key have become one list: ``--ids 1 2`` is ``--ids [1, 2]``."""
    words: list[str] = []
    for is_key, run in itertools.groupby(options, lambda word: word.startswith("--")):
        values = list(run)
        words += values if is_key or len(values) == 1 else [f"[{', '.join(values)}]"]
    return words


def _run_lightning(arguments: list[str] | None) -> None:
    try:
        lightning_cli(arguments)
    except SIGTERMException:  # Lightning's own exit code is that of a run that has finished
        sys.exit(128 + signal.SIGTERM)


def lightning_cli(arguments: list[str] | None, run: bool = True) -> FreshperCLI:
    """Run a subcommand or, where ``run`` is false, only make the parts of a run from the same options without one."""
    parser = {"parser_mode": "omegaconf", "default_env": True, "allow_abbrev": False}
    words = sys.argv[1:] if arguments is None else arguments
    # Only for help, which alone shows what stands below a field: reading it out of the sources takes a second.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=any(map(_asks_for_help, words)))
    return FreshperCLI(
        PolicyModule,
        LightningDataModule,
        subclass_mode_data=True,
        parser_class=FreshperParser,
        save_config_callback=SaveRunConfig,
        trainer_defaults={
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        },
        seed_everything_default=0,
        parser_kwargs={**parser, **MAIN_PARSER, **(_per_subcommand(parser) if run else {})},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=arguments,
        run=run,
    )


def _asks_for_help(word: str) -> bool:
    return word == "-h" or (word.startswith("--") and word.partition("=")[0].endswith("help"))


def _per_subcommand(parser: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(parser) for name in FreshperCLI.subcommands()}


def quiet() -> None:
    """Messages of ours from INFO on, and none of Lightning's hints about what is done here on purpose."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("freshper_lightning").setLevel(logging.INFO)
    hints = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    hints.addFilter(lambda record: not any(hint in str(record.msg) for hint in HINTS))
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for hint in HINTS:
        warnings.filterwarnings("ignore", message=f".*{hint}.*")
