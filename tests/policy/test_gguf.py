import sys

import pytest

from freshper_lightning.cli import main
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.gguf import bundled_gguf


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package that must not be imported; what reads GGUF files counts as installed."""
    folder = tmp_path / "carries_a_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("gguf", "accelerate"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_missing_package_is_named_together_with_what_installs_it():
    with pytest.raises(ConfigurationError, match=r"no_such_package.* cannot be imported; `make smollm2` .*--no-deps"):
        bundled_gguf("no_such_package")


def test_the_command_ends_with_that_sentence_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("freshper_lightning.commands.SMOLLM2_MODULE", "no_such_package")
    with pytest.raises(SystemExit, match="freshper: error: no_such_package"):
        main(["smollm2", "--path", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()


def test_the_file_is_found_without_importing_the_package(package):
    file = package / "model.Q4_1.gguf"
    file.touch()
    assert bundled_gguf(package.name) == file
    assert package.name not in sys.modules


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_package_without_exactly_one_model_is_refused(package, names):
    for name in names:
        (package / name).touch()
    with pytest.raises(ConfigurationError, match=f"carries_a_model must hold exactly one GGUF file, not {len(names)}"):
        bundled_gguf(package.name)
