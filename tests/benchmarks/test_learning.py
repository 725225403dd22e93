"""The tables of what tasks learn and of how fast they are played, from rows by hand."""

import math
from dataclasses import replace

import pytest

from benchmarks import learning, machine, rollout, rows
from benchmarks.learning import Row


def row(task, seed, before, after, target="task", **fields):
    shown = {"engine": "transformers", "greedy_before": 0.0, "greedy_after": 1.0, "core_minutes": 12.0, "commit": "c"}
    returns = dict.fromkeys(("return_before", "return_after", "greedy_return_before", "greedy_return_after"), -13.0)
    costs = {"environment_steps": 1, "optimizer_steps": 1, "share_replayed": 0.5, "minutes": 1.0, "cores": 2}
    values = shown | returns | costs | {"machine": "m"} | fields
    return Row(target=target, task=task, seed=seed, sampled_before=before, sampled_after=after, **values)


@pytest.fixture
def docs(tmp_path):
    for page, names in (("learning", ["runs"]), ("tasks", ["gains", "returns"])):
        marks = [f"{learning.BEGIN.format(name=n)}\nold\n{learning.END.format(name=n)}" for n in names]
        (tmp_path / f"{page}.md").write_text("\n".join(marks))
    return tmp_path


def test_finished_runs_are_kept_and_their_tables_written(docs, capsys):
    table = docs / "learning.csv"
    quick = row("frozenlake", 0, 223 / 512, 0.6, "quickstart")
    old = replace(quick, return_before=None, core_minutes=None)
    found = [old, *(row("search", seed, 0.2, after) for seed, after in enumerate((0.3, 0.4, 0.5)))]
    rows.write(table, found)
    options = ["--table", str(table), "--docs", str(docs), "--seeds", "0", "1", "2"]
    learning.main(["task", "--tasks", "search", *options])
    assert rows.read(table, Row) == found
    assert capsys.readouterr().out == ""
    assert "| quickstart | 0 | 43.6 % | 60.0 % | 16.4 | 0.0 % | 100.0 % |" in (docs / "learning.md").read_text()
    text = (docs / "tasks.md").read_text()
    assert "old" not in text
    assert "| `search` | 0, 1, 2 | 20.0 % | 40.0 % | 20.0 | -4.8 to 44.8 | 0.0 % | 100.0 % | 12 |" in text
    assert "| `frozenlake` | 0 | 43.6 % | 60.0 % | 16.4 | of one seed: none | 0.0 % | 100.0 % | – |" in text
    assert "| `search` | -13.00 | -13.00 | -13.00 | -13.00 |" in text


def test_a_table_of_tasks_has_no_other_engine(capsys):
    with pytest.raises(SystemExit):
        learning.main(["task", "--engine", "vllm"])
    assert "--engine=vllm must be transformers for task" in capsys.readouterr().err


def test_the_interval_of_a_mean_is_students():
    """Mean 2, standard deviation 1, three values: 4.3027 / sqrt(3) on either side."""
    assert learning.interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert learning.interval([1.0]) == (-math.inf, math.inf)


def test_the_table_of_play_has_a_line_for_each_way():
    shown = {"environments": 64, "turns": 8, "max_tokens": 16, "repetitions": 3, "threads": "2", "machine": "m"}
    line = rollout.Row("tiny", "vllm", "streaming", "0.1", 8192, 1234, 0.914, **shown, commit="c")
    assert "| tiny | vllm | 0.1 | streaming | 1,234 | 0.91 |" in rollout.page([line])


def test_a_measurement_belongs_to_the_commit_that_it_began_with(monkeypatch):
    for seen, said in ((["a", "a"], "a"), (["a", "b"], "a, changed"), (["a, changed", "b"], "a, changed")):
        commits = iter(seen)
        monkeypatch.setattr(machine, "code", lambda commits=commits: next(commits))
        with machine.same_commit() as measured:
            pass
        assert measured() == said
