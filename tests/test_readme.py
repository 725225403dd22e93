"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from tests.command import PATIENCE, ROOT

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(title):
    """The block of Python that begins with ``# title``."""
    (found,) = [code for code in PYTHON if code.startswith(f"# {title}\n")]
    return found


def freshper(folder, *arguments):
    script = Path(sys.executable).parent / "freshper"
    command = [script, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    """A folder of a user's, with both examples, the configs and a tiny model."""
    for title in ("guess.py", "mine.py"):
        (tmp_path / title).write_text(block(title))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    build_tiny(tmp_path / "model", TinySpec(hidden_size=32, heads=2, kv_heads=1, layers=1), byte_tokenizer())
    return tmp_path


def test_the_environment_and_the_priority_of_the_readme_train(folder):
    stack = ("-c", "configs/base.yaml", "-c", "configs/methods/freshper.yaml", "--model.path", "model")
    small = ("--trainer.max_epochs=1", "--rollout.groups=2", "--rollout.group_size=2", "--data.batch_size=4")
    quick = ("--evaluation.episodes=2", "--rollout.engine.name=transformers", "--rollout.engine.max_model_len=256")
    own = ("--rollout.environment.id=guess:Guess-v0", "--data.priority=mine.Surprise", "--data.priority.eps=0.1")
    said = freshper(folder, "fit", *stack, *small, *quick, *own)
    assert "success, sampled" in said
    assert (folder / "runs" / "run" / "version_0" / "checkpoints" / "last.ckpt").exists()


def test_the_buffer_is_usable_alone(capsys):
    (code,) = [code for code in PYTHON if "ReplayBuffer(" in code]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[0 0 0 0 0 0 0 0] [1. 1.")
