from pathlib import Path

import pytest

from freshper_lightning.cli import main
from freshper_lightning.policy.export import is_model_folder
from freshper_lightning.replacing import replacing


def test_the_old_folder_comes_back_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "old").touch()
    rename = Path.rename

    def fail_for_the_new_one(path, target):
        if path.name.endswith(".unfinished"):
            raise OSError("disk on fire")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with (
        pytest.raises(ValueError, match=r"path='.*index' cannot be written: disk on fire"),
        replacing(tmp_path / "index", lambda folder: True, "an index"),
    ):
        pass
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["index", "index/old"]


def test_a_folder_around_the_one_that_the_command_runs_in_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "index" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "index" / "here")
    with (
        pytest.raises(ValueError, match="not one that the command runs in"),
        replacing(tmp_path / "index", lambda folder: True, "an index"),
    ):
        pass


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        (
            ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
            True,
        ),
        (
            ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
            True,
        ),
        (("config.json", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"), True),
        (("model.safetensors", "tokenizer.json"), False),
        (("config.json", "thesis.tex"), False),
        (("config.json", ".git"), False),
    ],
)
def test_a_model_is_replaced_and_nothing_that_stands_beside_one(tmp_path, names, ours):
    for name in names:
        (tmp_path / name).touch()
    assert is_model_folder(tmp_path) == ours


def test_what_is_no_model_is_not_written_over(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit, match=f"path='{tmp_path}' must be a folder .* holds a model and nothing else"):
        main(["tiny", f"--path={tmp_path}", "--episodes=2"])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_the_caller_cannot_read_is_not_blamed_on_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="corpus"), replacing(tmp_path / "index", lambda folder: True, "one"):
        (tmp_path / "corpus").read_text()
    assert not list(tmp_path.iterdir())
