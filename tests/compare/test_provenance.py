"""A result says which code it comes from."""

import re
from importlib.metadata import version

import pytest

from freshper_lightning.compare import marker, provenance
from freshper_lightning.compare.marker import Marker


def test_the_code_is_a_commit_and_whether_it_was_changed_or_a_version_where_there_is_no_checkout(tmp_path, monkeypatch):
    if (provenance.ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}(, changed)?", provenance.code())
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.code() == version("freshper-lightning")


@pytest.mark.parametrize(("codes", "said"), [("aa", "a"), ("ab", "a to b")])
def test_a_run_that_goes_on_with_other_code_says_both(tmp_path, monkeypatch, codes, said):
    run = Marker(tmp_path, {"seed": 0})
    monkeypatch.setattr(marker, "code", lambda: codes[0])
    run.begin()
    monkeypatch.setattr(marker, "code", lambda: codes[1])
    run.begin()
    run.finish(1.0)
    assert (run.code(), run.seconds()) == (said, 1.0)
