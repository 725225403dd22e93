"""A result says which code it comes from."""

import re
import subprocess
from importlib.metadata import version

import pytest

from freshper_lightning.compare import marker, provenance
from freshper_lightning.compare.marker import Marker


def test_the_code_is_a_commit_and_whether_it_was_changed_or_a_version_where_there_is_no_checkout(tmp_path, monkeypatch):
    if (provenance.ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}(, changed)?", provenance.code())
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)  # of somebody else
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "site-packages")
    assert provenance.code() == version("freshper-lightning")


@pytest.mark.parametrize(("codes", "said"), [("aa", "a"), ("ab", "a to b")])
def test_a_run_that_goes_on_with_other_code_says_both(tmp_path, monkeypatch, codes, said):
    run = Marker(tmp_path, {"seed": 0})
    monkeypatch.setattr(marker, "code", lambda: codes[0])
    run.begin()
    monkeypatch.setattr(marker, "code", lambda: codes[1])
    run.begin(goes_on=True)
    run.finish(1.0)
    assert (run.code(), run.seconds()) == (said, 1.0)


def test_what_is_made_anew_is_of_the_code_that_made_it(tmp_path, monkeypatch):
    run = Marker(tmp_path, {"seed": 0})
    for name in "ab":
        monkeypatch.setattr(marker, "code", lambda name=name: name)
        run.begin()
    run.finish(1.0)
    assert run.code() == "b"
