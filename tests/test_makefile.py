"""What `make task` refuses, at once and with nothing removed."""

import os
import subprocess

import pytest

from tests.command import ROOT

WRONG = {
    ("TASK=chess",): "there is no configs/tasks/chess.yaml; tasks: ",
    ("METHOD=magic",): "there is no configs/methods/magic.yaml",
    ("METHOD=warm_start",): "METHOD=warm_start must be another",
    ("METHOD=../quickstart",): "METHOD='../quickstart' must be a name without folders",
    ("METHOD=a b",): "METHOD='a b' must be one word",
    ("ENGINE=foo",): "rollout.engine.name=foo must be one of auto, transformers, vllm",
    ("ARGS=--rollout.group=3",): "there is no key rollout.group; did you mean rollout.groups",
}


@pytest.mark.parametrize("options", WRONG, ids=lambda options: options[0])
def test_what_cannot_be_trained_is_refused_before_the_warm_start(tmp_path, options):
    kept = tmp_path / "policy" / "kept"
    kept.mkdir(parents=True)
    installed = [part for name in (".light", ".vllm") for part in ("-o", f".venv/{name}")]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TASK", "METHOD", "ENGINE", "ARGS")
    }
    found = subprocess.run(
        ["make", *installed, "task", f"RUN={tmp_path}", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode != 0
    assert WRONG[options] in found.stderr
    assert "1/3" not in found.stdout
    assert kept.exists()
