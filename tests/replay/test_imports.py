import ast
import subprocess
import sys
from pathlib import Path

import freshper_lightning.replay

FOLDER = Path(freshper_lightning.replay.__file__).parent


def test_the_buffer_is_usable_without_a_trainer():
    script = "import sys, freshper_lightning.replay; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    loaded = set(result.stdout.split())
    assert "freshper_lightning" in loaded
    assert not loaded & {"lightning", "pytorch_lightning", "transformers", "vllm", "datamodules"}


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
