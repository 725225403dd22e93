import re
import time

import numpy as np
import pytest

from benchmarks.replay import page, table
from benchmarks.replay.__main__ import main
from benchmarks.replay.buffers import EXPONENTIAL, OURS, PUBLISHED, maker
from benchmarks.replay.measure import ADD, BYTES, DRAW, LOAD, OPERATIONS, UPDATE
from benchmarks.replay.payload import BATCH, Payload, make_batches
from benchmarks.replay.stopwatch import Effort, Stopwatch
from benchmarks.replay.table import MemoryRow, Results, Row
from benchmarks.replay.targets import targets

ROW = Row(50_000, 512, EXPONENTIAL, DRAW, 0.1, 0.09, 0.2, 0.08, 30, 10.0, "abc", "a machine")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to work in, with a page that has a mark for every table and nothing between them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.machine.code", lambda: "abc")
    marks = [(page.BEGIN.format(name=name), page.END.format(name=name)) for name in ("speed", "targets", "memory")]
    (tmp_path / "page.md").write_text("\n".join(f"before\n{begin}\nold\n{end}\nafter" for begin, end in marks))
    return tmp_path


def run(*arguments):
    few = (
        "--repetitions",
        "3",
        "--budget",
        "1",
        "--memory-tokens",
        "1",
        "--page",
        "page.md",
        "--table",
        "t.csv",
        "--memory",
        "m.csv",
    )
    main([*few, *arguments])


def test_one_command_measures_everything_and_writes_table_and_page(files, capsys):
    run("--sizes", "300", "--buffers", *OURS, PUBLISHED)
    results = Results(table.read(files / "t.csv", Row))
    for buffer in (*OURS, PUBLISHED):
        assert results.find(300, buffer, BYTES).median > 512 * 4
        for operation in (ADD, UPDATE, DRAW):
            row = results.find(300, buffer, operation)
            assert row.repetitions >= 3
            assert 0 < row.least <= row.lower_quartile <= row.median <= row.upper_quartile < 1000
    assert {row.operation for row in results.rows if row.buffer == EXPONENTIAL} == {*OPERATIONS, BYTES}
    assert results.find(300, PUBLISHED, LOAD) is None
    text = (files / "page.md").read_text()
    assert text.count("before") == text.count("after") == 3
    assert "old" not in text
    assert re.search(r"\| 300 \| 512 \| ours, exponential \|", text)
    assert "torchrl" in capsys.readouterr().out  # as a target that was not measured


def test_finished_sizes_are_kept(files):
    run("--sizes", "256", "--buffers", PUBLISHED)
    before = table.read(files / "t.csv", Row)
    run("--sizes", "256", "384", "--buffers", PUBLISHED)
    after = table.read(files / "t.csv", Row)
    assert after[: len(before)] == before
    assert {row.size for row in after[len(before) :]} == {384}


def test_an_action_over_the_limit_is_interrupted_and_not_tried_again():
    watch, calls = Stopwatch(Effort(repetitions=3, limit=0.05)), []

    def slow():
        calls.append(1)
        while True:
            time.sleep(0.001)

    watch.rounds(lambda: watch.time("slow", slow))
    assert len(calls) == 1
    assert watch.over == {"slow"}
    assert watch.knows("slow")


@pytest.mark.parametrize("name", [*OURS, PUBLISHED])
def test_every_buffer_does_what_is_measured(name):
    contender = maker(name, 2 * BATCH)(2 * BATCH, make_batches(Payload(64), 2))
    contender.fill(1)
    assert len(contender.keys()) == BATCH
    for _ in range(3):
        contender.add()
    assert len(contender.keys()) == 2 * BATCH
    contender.update(contender.keys()[:5], np.ones(5))
    contender.decay_and_draw()
    contender.draw_and_read()


def test_the_published_loops_draw_by_priority():
    contender = maker(PUBLISHED, BATCH)(BATCH, make_batches(Payload(64), 1))
    contender.fill(1)
    contender.update(np.arange(BATCH), np.where(np.arange(BATCH) < 2, 1.0, 1e-6))
    drawn = np.bincount(contender._slots(), minlength=BATCH)
    assert drawn[:2].sum() > 0.9 * BATCH
    assert abs(drawn[0] - drawn[1]) <= 4


@pytest.mark.parametrize(("median", "verdict"), [(0.2, "met"), (0.21, "missed"), (None, "not measured")])
def test_a_target_is_met_missed_or_not_measured(median, verdict):
    rows = [Row(50_000, 512, name, DRAW, median, 1, 1, 1, 3, 10, "", "") for name in OURS]
    first = targets(Results(rows), [])[0]
    assert "0.2 ms" in first.text
    assert first.verdict == verdict


def test_what_is_over_the_limit_and_what_is_missing_are_told_apart(tmp_path):
    rows = [ROW, Row(50_000, 512, EXPONENTIAL, UPDATE, None, None, None, None, 0, 5.0, "abc", "a machine")]
    rows.append(Row(50_000, 512, EXPONENTIAL, BYTES, 5120.0, None, None, None, 1, 5.0, "abc", "a machine"))
    table.write(tmp_path / "t.csv", rows)
    assert table.read(tmp_path / "t.csv", Row) == rows
    line = page.speed_table(Results(rows)).splitlines()[2]
    assert line == "| 50,000 | 512 | ours, exponential | – | – | over 5 s | 0.1 | – | – | – | – | – | 10.0 |"


def test_memory_rows_survive_their_file(tmp_path):
    rows = [MemoryRow(512, 10, 0.5, "float16", 896, 6.5, 7.25)]
    table.write(tmp_path / "m.csv", rows)
    assert table.read(tmp_path / "m.csv", MemoryRow) == rows


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"page\.md must have one"):
        page.put_into(tmp_path / "page.md", {"speed": "x"})
