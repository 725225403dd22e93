"""The page of a comparison: figures with intervals, differences from the baseline, and how far they can be trusted."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from freshper_lightning.compare.collect import Row
from freshper_lightning.compare.curves import Curve, curves_of
from freshper_lightning.compare.measures import AREA, DROP, FINAL, MEASURES, STEPS, Measures, Outcome, measure
from freshper_lightning.compare.pictures import draw_arms, draw_curves, draw_outcomes
from freshper_lightning.compare.settings import Comparison
from freshper_lightning.compare.statistics import Estimate, sign_test
from freshper_lightning.errors import ConfigurationError

FINALS, CURVES, ARMS, PAGE = "final.png", "curves.png", "arms.png", "report.md"

DEFINITIONS = {
    FINAL: "mean of the last {window} evaluations of a run",
    AREA: "mean height of the curve over environment steps, up to {horizon:,.0f}, the fewest that a run ended with"
    " ({shortest})",
    STEPS: "environment steps at the first evaluation of at least {threshold}; the threshold was fixed beforehand as"
    " {share:.0%} of the baseline's result, and a run that starts above it counts with 0. A run that is not there"
    " after {horizon:,.0f} is censored: it counts with these, so that the figure is a lower bound (≥) and its interval"
    " ends too low. Runs that are there at the same evaluation are neither above nor below one another",
    DROP: "greatest mean of {window} consecutive evaluations less that of the last {window}",
}


def write_report(
    rows: Sequence[Row], comparison: Comparison, folder: Path, missing: Mapping[str, str], search: str = ""
) -> Path:
    """Write the page and its pictures; returns the page.

    Args:
        rows: The table of evaluations; other tasks' are left out.
        comparison: Which measures, and which baseline.
        folder: Where they go.
        missing: Runs that were asked for and are not there, and why.
        search: Where learning rates come from, in words.

    Raises:
        ConfigurationError: There is nothing to report.
    """
    own = [row for row in rows if row.task == comparison.task]
    if not own:
        there = ", ".join(sorted({row.task for row in rows})) or "none at all"
        raise ConfigurationError(f"the table must have rows of task={comparison.task}; it has {there}")
    curves = _ordered(curves_of(own, comparison.metric, comparison.mode), comparison)
    folder.mkdir(parents=True, exist_ok=True)
    label = f"{comparison.metric}, {comparison.mode}"
    window = f"{label}: mean of the last {comparison.final_window} evaluations, interval and every seed"
    draw_outcomes(measure(curves, comparison).outcomes[FINAL], comparison.baseline, window, folder / FINALS)
    draw_curves(curves, comparison.baseline, label, folder / CURVES)
    draw_arms(curves, comparison.baseline, label, folder / ARMS)
    page = folder / PAGE
    modes = sorted({row.mode for row in own} - {comparison.mode})
    others = {mode: measure(curves_of(own, comparison.metric, mode), comparison) for mode in modes}
    page.write_text("\n\n".join(_sections(own, curves, others, comparison, missing, search)) + "\n")
    return page


def _ordered(curves: Sequence[Curve], comparison: Comparison) -> list[Curve]:
    """The baseline first, then the arms as configured, then those that only the table knows."""
    arms = comparison.chosen(None)
    return sorted(curves, key=lambda curve: arms.index(curve.arm) if curve.arm in arms else len(arms))


def _sections(
    rows: Sequence[Row],
    curves: Sequence[Curve],
    others: Mapping[str, Measures],
    comparison: Comparison,
    missing: Mapping[str, str],
    search: str,
) -> Iterable[str]:
    found = measure(curves, comparison)
    yield f"# {comparison.task}: {comparison.metric} of held-out episodes, {comparison.mode}"
    if warning := nothing_learned(curves):
        yield f"**{warning}**"
    yield _trust(curves)
    yield f"{_evaluations(rows, found.start)} {search}".strip()
    yield f"Made with code {', '.join(sorted({row.code for row in rows}))}."
    yield f"![The result of each arm, with its interval and every seed]({FINALS})"
    yield f"![Learning curves of all arms]({CURVES})\n\n![Each arm beside the baseline]({ARMS})"
    yield _definitions(found, comparison)
    yield "## Arms\n\n" + _arms_table(rows, curves, found, others)
    for reference in [comparison.baseline, *comparison.references]:
        if reference in found.outcomes[FINAL]:
            yield f"## Differences from {reference}\n\n" + _differences(found, reference)
    if missing:
        yield "## Not there\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in missing.items())


def _trust(curves: Sequence[Curve]) -> str:
    seeds = {arm: sum(curve.arm == arm for curve in curves) for arm in (curve.arm for curve in curves)}
    fewest, most = min(seeds.values()), max(seeds.values())
    number = counted(fewest, "seed") if fewest == most else f"{fewest} to {most} seeds"
    text = (
        f"{number} per arm. Values are interquartile means over seeds [95 % percentile interval of the stratified"
        " bootstrap]. Differences are paired by seed, since all arms of a seed start from the same policy."
    )
    if most < 2:
        text += " A single seed has no interval: what is below says nothing about how runs differ."
    elif fewest < 10:
        text += (
            " With so few seeds the intervals are too narrow (docs/results.md has their measured coverage), and one"
            " unusual seed moves them: take them for the spread of what was seen. The sign test beside each difference"
            f" does not rest on the bootstrap; with {counted(fewest, 'seed')} it cannot get below"
            f" {sign_test(fewest, 0):.2g}. Many arms are compared with one baseline, and nothing corrects for that."
        )
    return text


def nothing_learned(curves: Sequence[Curve]) -> str:
    """A warning where no evaluation differs from another, as where every return of a group is alike; else nothing."""
    values = np.concatenate([curve.values for curve in curves])
    if np.ptp(values) > 0:
        return ""
    return (
        f"Every evaluation of every run is {values[0]:.3f}: nothing was learned, or nothing was left to learn, and so"
        " nothing is compared. The output.txt in a run's folder says whether its rollouts had anything to learn from."
    )


def _evaluations(rows: Sequence[Row], start: float) -> str:
    episodes = sorted({row.episodes for row in rows})
    counts = ", ".join(map(str, episodes))
    return (
        f"The first evaluation is {start:.3f} on average. Each is of {counts} held-out episodes, so that a success rate"
        f" has a standard error of up to {np.sqrt(0.25 / episodes[0]):.3f}; the part of it that comes from the"
        " instances is the same for all arms, and is in no interval."
    )


def _definitions(found: Measures, comparison: Comparison) -> str:
    threshold = "" if found.threshold is None else f"{found.threshold:.3f}"
    values = {"window": comparison.final_window, "threshold": threshold, "share": comparison.threshold}
    values |= {"horizon": found.horizon, "shortest": found.shortest}
    lines = [f"- **{name}**: {DEFINITIONS[name].format(**values)}" for name in MEASURES if name in found.outcomes]
    if found.threshold is not None and found.start >= found.threshold:
        lines.append(f"- Runs start at {found.start:.3f} on average, above the threshold: steps to it say little here")
    if comparison.baseline not in found.outcomes[FINAL]:
        lines.append(f"- Threshold and differences would be those of {comparison.baseline}, of which no run is here")
    elif found.threshold is None:
        lines.append(f"- **{STEPS}**: none, since {comparison.baseline} has no result above 0 to take a share of")
    return "\n".join(lines)


def _arms_table(rows: Sequence[Row], curves: Sequence[Curve], found: Measures, others: Mapping[str, Measures]) -> str:
    """Others are those of the modes that the report is not about."""
    measures = [name for name in MEASURES if name in found.outcomes]
    beside = [f"{FINAL}, {mode}" for mode in others]
    costs = ["learning rate", "optimizer steps", "environment steps", "minutes"]
    columns = ["arm", "seeds", *measures, *beside, *costs]
    lines = []
    for arm in found.outcomes[FINAL]:
        own = [curve for curve in curves if curve.arm == arm]
        values = [_with_interval(found.outcomes[name][arm], name) for name in measures]
        known = (other.outcomes[FINAL].get(arm) for other in others.values())
        values += ["–" if outcome is None else _with_interval(outcome, FINAL) for outcome in known]
        lines.append([arm, str(len(own)), *values, *_costs([row for row in rows if row.arm == arm], own)])
    return table(columns, lines)


def _costs(rows: Sequence[Row], curves: Sequence[Curve]) -> list[str]:
    """What one arm ran with, and how long."""
    rates = sorted({row.learning_rate for row in rows if row.learning_rate is not None})
    updates, steps, seconds = (
        float(np.mean(values))
        for values in zip(*((c.update[-1], c.environment_steps[-1], c.seconds[-1]) for c in curves), strict=True)
    )
    shown = ", ".join(f"{rate:.2g}" for rate in rates) or "–"
    minutes = seconds / 60
    return [shown, f"{updates:,.0f}", f"{steps:,.0f}", f"{minutes:.1f}" if minutes >= 1 else f"{minutes:.2f}"]


def _differences(found: Measures, reference: str) -> str:
    measures = [name for name in MEASURES if name in found.outcomes]
    lines = []
    for arm in found.outcomes[FINAL]:
        if arm != reference:
            cells = [_difference(found.outcomes[name], arm, reference, name) for name in measures]
            lines.append([arm, *cells])
    note = "In brackets the interval, then in how many seeds the arm is above and below, and the sign test's p."
    return f"{note}\n\n{table(['arm', *measures], lines)}"


def _with_interval(outcome: Outcome, measure: str) -> str:
    text = interval(outcome.estimate, "{:,.0f}" if measure == STEPS else "{:.3f}")
    runs = len(outcome.by_seed)
    return f"≥ {text}, {runs - outcome.censored} of {runs} reached it" if outcome.censored else text


def _difference(outcomes: Mapping[str, Outcome], arm: str, baseline: str, measure: str) -> str:
    found = outcomes[arm].less(outcomes[baseline]) if baseline in outcomes else None
    if found is None:
        return "no common seed"
    p = sign_test(found.above, found.below)
    shown = interval(found.estimate, "{:+,.0f}" if measure == STEPS else "{:+.3f}")
    text = f"{shown}, {found.above} above, {found.below} below of {found.estimate.runs}, p {p:.2g}"
    return f"{text} (censored runs in it)" if outcomes[arm].censored or outcomes[baseline].censored else text


def interval(found: Estimate, form: str) -> str:
    """``0.52 [0.48, 0.57]``, each number in the form; without an interval where there is one seed."""
    if found.low is None or found.high is None:
        return form.format(found.value)
    return f"{form} [{form}, {form}]".format(found.value, found.low, found.high)


def counted(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
