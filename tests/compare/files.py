"""The tiny comparison, and variants of it."""

from pathlib import Path

from omegaconf import OmegaConf

from tests.command import ROOT

TINY_COMPARISON = ROOT / "tests" / "data" / "compare.yaml"


def edited(path: Path, changes: dict) -> Path:
    """The tiny comparison with changes, as a file."""
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(TINY_COMPARISON), changes), path)
    return path
