from pathlib import Path

import pytest

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


def test_what_the_caller_cannot_read_is_not_blamed_on_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="corpus"), replacing(tmp_path / "index", lambda folder: True, "one"):
        (tmp_path / "corpus").read_text()
    assert not list(tmp_path.iterdir())
