"""The tiny comparison, variants of it, and the command."""

from pathlib import Path

from omegaconf import OmegaConf

from freshper_lightning.cli import main
from tests.command import ROOT

TINY_COMPARISON = ROOT / "tests" / "data" / "compare.yaml"


def edited(path: Path, changes: dict) -> Path:
    """The tiny comparison with changes, as a file."""
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(TINY_COMPARISON), changes), path)
    return path


def diverging(rate: float) -> dict:
    """Changes with which the second arm diverges above a learning rate."""
    bound = {"class_path": "tests.compare.killing.DivergesAbove", "init_args": {"rate": rate}}
    return {"arms": {"freshper_50": {"settings": {"trainer": {"callbacks": [bound]}}}}}


def compare(file: Path, folder: Path, *options: str) -> None:
    """`freshper compare`, one run at a time."""
    main(["compare", "-c", str(file), "--folder", str(folder), "--jobs=1", *options])
