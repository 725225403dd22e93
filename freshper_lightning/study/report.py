"""The results of a study as Markdown: by age, by loss and age, and how the variance grows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from freshper_lightning.algorithms.ratios import LEVELS
from freshper_lightning.study.growth import fit_growth, local_exponents
from freshper_lightning.study.table import Row

INTRODUCTION = """# Staleness

Made by `freshper compare --study ess` out of the CSV file of the same name. What the columns mean is in docs/losses.md,
"Which correction holds at which age", and in docs/method.md, "Measured: how the variance grows".

Where the ceiling of the cosine is near 0, or intervals are wider than 1, there are too few groups to tell anything; a
value may then lie outside of its interval, and – stands where noise leaves nothing to divide by."""

Run = tuple[str, int]
"""Task and seed."""

FIT_AGES = 4
"""How many there must be, 0 included, for a fit to say anything."""
ITSELF = "the arm"
"""Beside its variants."""

BY_AGE = {
    "return": "return",
    "KL(behavior, current) / token": "kl_behavior_current",
    "KL(current, behavior) / token": "kl_current_behavior",
    "KL(behavior, current) / episode": "kl_behavior_current_sequence",
    "KL(current, behavior) / episode": "kl_current_behavior_sequence",
    **{f"ESS / n, {level}": f"ess_{level}" for level in LEVELS},
    "exp(-KL(current, behavior) / episode), bound of ESS / n, sequence": "ess_bound_sequence",
    **{f"exp(-variance), {level}": f"gaussian_ess_{level}" for level in LEVELS},
    "tokens beyond the clip": "clip_share",
    "ceiling of the cosine": "ceiling",
}
BY_LOSS = {
    "Cosine to the fresh gradient": "cosine",
    "Cosine of the expected gradients": "direction",
    "Norm over that of the fresh gradient": "norm_ratio",
}


def runs(rows: Iterable[Row]) -> list[Run]:
    """What the rows are about, in order."""
    return list(dict.fromkeys((row.task, row.seed) for row in rows))


def curve(rows: Iterable[Row], run: Run, quantity: str, loss: str = "", variant: str = "") -> dict[int, Row]:
    """The rows of one quantity by age."""
    wanted = (*run, quantity, loss, variant)
    found = [row for row in rows if (row.task, row.seed, row.quantity, row.loss, row.variant) == wanted]
    return {row.age: row for row in sorted(found, key=lambda row: row.age)}


def variants(rows: Iterable[Row]) -> list[str]:
    """Of the arm: first itself, as an empty text."""
    return list(dict.fromkeys(["", *(row.variant for row in rows)]))


def losses(rows: Iterable[Row]) -> list[str]:
    """Names of the losses, in order."""
    return list(dict.fromkeys(row.loss for row in rows if row.loss))


def page(rows: Sequence[Row]) -> str:
    """All tables of all runs."""
    return "\n\n".join([INTRODUCTION, *(part for run in runs(rows) for part in _of_run(rows, run))]) + "\n"


def _of_run(rows: Sequence[Row], run: Run) -> list[str]:
    by_age = {name: curve(rows, run, quantity) for name, quantity in BY_AGE.items()}
    parts = [f"## {run[0]}, seed {run[1]}", _table("age in updates", by_age, _plain)]
    for title, quantity in BY_LOSS.items():
        parts.append(_table(title, {loss: curve(rows, run, quantity, loss) for loss in losses(rows)}, _with_interval))
    return [part for part in (*parts, *_growth(rows, run)) if part]


def _table(title: str, curves: dict[str, dict[int, Row]], shown: Callable[[Row], str]) -> str:
    ages = sorted({age for found in curves.values() for age in found})
    if not ages:
        return ""
    lines = [[title, *map(str, ages)], ["---"] * (len(ages) + 1)]
    present = {name: found for name, found in curves.items() if found}
    lines += [[name, *(shown(found[age]) if age in found else "" for age in ages)] for name, found in present.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(row: Row) -> str:
    return f"{row.value:.2g}" if abs(row.value) < 0.01 else f"{row.value:.3f}"


def _with_interval(row: Row) -> str:
    value = "–" if math.isnan(row.value) else f"{row.value:.2f}"
    return f"{value} [{row.low:.2f}, {row.high:.2f}]"


def _growth(rows: Sequence[Row], run: Run) -> list[str]:
    """How the variance grows, of the arm and its variants."""
    found = {
        f"{level}, {variant or ITSELF}": curve(rows, run, f"variance_{level}", variant=variant)
        for level in LEVELS
        for variant in variants(rows)
    }
    columns = ["growth", "linear: tau, R2", "quadratic: tau, R2", "smaller AIC", "exponent between ages"]
    lines = [columns, ["---"] * len(columns)]
    enough = {name: by_age for name, by_age in found.items() if len(by_age) >= FIT_AGES}
    lines += [[name, *_fits({age: row.value for age, row in by_age.items()})] for name, by_age in enough.items()]
    fits = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return [
        _table("Variance of log-ratios", found, _plain),
        fits if enough else f"No fits: fewer than {FIT_AGES} ages.",
    ]


def _fits(variances: Mapping[int, float]) -> list[str]:
    fits = [fit_growth(variances, growth) for growth in ("linear", "quadratic")]
    slopes = ", ".join(f"{a}-{b}: {slope:.2f}" for (a, b), slope in local_exponents(variances).items())
    (linear, _), (quadratic, _) = fits
    better = "linear" if linear.log_likelihood > quadratic.log_likelihood else "quadratic"  # each has one parameter
    return [*(f"{fit.tau_hat():.0f}, {r2:.2f}" for fit, r2 in fits), better, slopes]
