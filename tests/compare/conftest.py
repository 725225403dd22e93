import pytest

from tests.command import ROOT, environment


@pytest.fixture
def tiny_environment(monkeypatch, model_path, tmp_path):
    """What the tiny comparison needs to know: where its model is, and the repository's folder as the current one."""
    monkeypatch.chdir(ROOT)
    for name, value in environment(model_path, tmp_path).items():
        monkeypatch.setenv(name, value)
