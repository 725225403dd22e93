import ast
import subprocess
import sys
from pathlib import Path

import pytest

import freshper_lightning.replay

FOLDER = Path(freshper_lightning.replay.__file__).parent


SCRIPT = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
    importlib.import_module(module.name)
print(*sys.modules)
"""


TRAINERS = {"lightning", "pytorch_lightning", "vllm", "datamodules"}


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("replay", TRAINERS | {"transformers"}),
        ("algorithms", TRAINERS | {"transformers"}),
        ("envs", TRAINERS),  # `answers` uses torchmetrics, which imports transformers
    ],
)
def test_packages_that_are_usable_without_a_trainer_load_nothing_of_one(name, unwanted):
    command = [sys.executable, "-c", SCRIPT, f"freshper_lightning.{name}"]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    assert len([module for module in loaded if module.startswith(f"freshper_lightning.{name}.")]) > 5
    assert not unwanted & {module.split(".")[0] for module in loaded}


def test_nothing_in_the_core_names_torch_distributed():
    trees = [ast.parse(path.read_text()) for path in FOLDER.glob("*.py")]
    imported = {
        name.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not any("distributed" in name for name in imported)
    attributes = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "distributed" not in attributes
