"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from freshper_lightning.compare.plan import Plan
from freshper_lightning.compare.settings import read_comparison
from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from tests.command import PATIENCE, ROOT

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(title, page="README.md"):
    """The block of a page that begins with ``# title``."""
    blocks = re.findall(r"```\w+\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (found,) = [code for code in blocks if re.match(rf"# {re.escape(title)}\b", code)]
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


def test_a_tiny_policy_of_ones_own_is_warm_started_as_the_docs_say(folder):
    (folder / "guess_policy.py").write_text(block("guess_policy.py", "docs/tasks.md"))
    freshper(folder, "tiny", "--path=base", "--task=guess_policy", "--spec.hidden_size=32", "--spec.layers=1")
    stack = ("-c", "configs/base.yaml", "-c", "configs/methods/warm_start.yaml", "--model.path=base")
    own = ("--rollout.environment.id=guess:Guess-v0", "--data.demonstrate=guess_policy.demonstrate")
    small = ("--trainer.max_epochs=1", "--data.episodes=32", "--evaluation.episodes=4")
    said = freshper(folder, "fit", *stack, *own, *small, "--rollout.engine.name=transformers")
    assert "success, greedy" in said


def test_the_comparison_of_the_docs_is_one(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "mine.yaml").write_text(block("mine.yaml", "docs/results.md"))
    comparison = read_comparison("mine.yaml")
    arms = Plan(comparison, folder / "results", comparison.chosen(None)).recipes
    assert list(arms) == ["on_policy", "on_policy_epochs", "freshper"]
    assert {arm.config["rollout"]["environment"]["id"] for arm in arms.values()} == {"guess:Guess-v0"}
    (folder / "guess_policy.py").write_text(block("guess_policy.py", "docs/tasks.md"))
    (warm,) = re.findall(r"```yaml\n(warm_start:\n.*?)```", (ROOT / "docs/results.md").read_text(), re.DOTALL)
    without = [line for line in (folder / "mine.yaml").read_text().splitlines() if not line.startswith("model:")]
    (folder / "warm.yaml").write_text("\n".join([*without, warm]))
    comparison = read_comparison("warm.yaml")
    (start,) = Plan(comparison, folder / "results", comparison.chosen(None)).warm_starts([0])
    assert start.recipe.config["data"]["init_args"]["demonstrate"] == "guess_policy.demonstrate"
    assert start.tiny == {"task": "guess_policy"}


def test_the_buffer_is_usable_alone(capsys):
    (code,) = [code for code in PYTHON if "ReplayBuffer(" in code]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[0 0 0 0 0 0 0 0] [1. 1.")
