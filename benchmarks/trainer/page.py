"""The tables of docs/trainer.md."""

from pathlib import Path

from benchmarks.pages import Target, put_between, significant, table, target_table
from benchmarks.trainer.cases import Case, Kind, cases
from benchmarks.trainer.results import Results, Row

BEGIN, END = "<!-- {name}: written by `make bench-trainer` -->", "<!-- end of {name} -->"


def put_into(page: Path, results: Results, found: list[Target]) -> dict[str, str]:
    """Replaces the tables on the page, and returns them."""
    sections = {
        "iterations": iteration_table(results),
        "ragged": ragged_table(results),
        "targets": target_table(found),
        "machine": machine_lines(results),
    }
    put_between(page, sections, BEGIN, END)
    return sections


def iteration_table(results: Results) -> str:
    """Medians over runs: one line for each model and case."""
    head = ["model", "trainer", "precision", "micro-batches", "checkpointing", "iteration, s", "generation, s"]
    columns = [*head, "tokens/s", "training, s", "tokens/s", "peak, MiB", "runs"]
    return table(columns, (_iteration_line(results, model, case) for model, case in _measured(results, "whole")))


def _iteration_line(results: Results, model: str, case: Case) -> list[str]:
    values = (
        _median(results, model, case, "seconds"),
        _median(results, model, case, "generation"),
        _median(results, model, case, "generation_speed"),
        _median(results, model, case, "training"),
        _median(results, model, case, "training_speed"),
        _median(results, model, case, "peak_mib"),
    )
    checkpointing = "yes" if case.checkpointing else "no"
    setting = [model, case.trainer, case.precision, str(case.micro_batches), checkpointing]
    return [*setting, *values, str(len(results.of(model, case)))]


def ragged_table(results: Results) -> str:
    """Medians over runs of training on completions of different lengths."""
    columns = ["model", "trainer", "precision", "tokens", "training, s", "tokens/s", "peak, MiB", "runs"]
    return table(columns, (_ragged_line(results, model, case) for model, case in _measured(results, "ragged")))


def _ragged_line(results: Results, model: str, case: Case) -> list[str]:
    rows = results.of(model, case)
    values = [_median(results, model, case, name) for name in ("training", "training_speed", "peak_mib")]
    tokens = rows[0].prompt_tokens + rows[0].completion_tokens
    return [model, case.trainer, case.precision, f"{tokens:,}", *values, str(len(rows))]


def _measured(results: Results, kind: Kind) -> list[tuple[str, Case]]:
    found = [case for case in cases() if case.kind == kind]
    return [(model, case) for model in results.models() for case in found if results.of(model, case)]


def _median(results: Results, model: str, case: Case, name: str) -> str:
    value = results.median(model, case, lambda row: float(getattr(row, name)))
    return "–" if value is None else significant(value)


def machine_lines(results: Results) -> str:
    """Where the numbers come from, one line for each trainer and commit."""
    return "\n".join(sorted({_origin(row) for row in results.rows})) + "\n" + _loads(results)


def _origin(row: Row) -> str:
    side = "TRL" if row.trainer == "TRL" else "Ours"
    return f"- {side}: {row.versions}; {row.threads} threads of {row.machine}, seed {row.seed}, commit {row.commit}."


def _loads(results: Results) -> str:
    loads = [row.load for row in results.rows]
    return f"- Load average ahead of a run: {min(loads):.1f} to {max(loads):.1f}, the runs before it included."
