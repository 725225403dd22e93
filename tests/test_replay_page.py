"""What docs/replay.md shows works as it stands there."""

import re
from pathlib import Path

from benchmarks.replay.page import put_into

PAGE = Path(__file__).parent.parent / "docs" / "replay.md"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "replay.md", "exec"), {"__name__": "example"})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8
    assert all(re.fullmatch(r"group \d+, 6 sampled tokens, weight [01]\.\d\d, \d+ updates old", line) for line in said)
    assert (tmp_path / "buffer.state").exists()


def test_the_tables_have_their_places(tmp_path):
    copy = tmp_path / "replay.md"
    copy.write_text(PAGE.read_text())
    put_into(copy, {name: f"the {name} table" for name in ("speed", "targets", "memory")})
    text = copy.read_text()
    assert all(f"the {name} table" in text for name in ("speed", "targets", "memory"))
    put_into(copy, {"speed": "another"})
    assert "the speed table" not in copy.read_text()


def test_pictures_are_where_the_page_shows_them():
    for name in re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text()):
        assert (PAGE.parent / name).stat().st_size > 0
