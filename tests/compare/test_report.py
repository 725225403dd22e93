"""What a run comes to, by hand; what the page says of runs that end well, badly or not at all."""

import dataclasses

import numpy as np
import pytest

from freshper_lightning.compare.collect import Row, read_table, write_table
from freshper_lightning.compare.curves import Curve, curves_of
from freshper_lightning.compare.measures import AREA, DROP, FINAL, STEPS, measure
from freshper_lightning.compare.pictures import on_common_places
from freshper_lightning.compare.report import write_report
from freshper_lightning.compare.settings import Arm, Comparison
from freshper_lightning.errors import ConfigurationError

HEIGHTS = {"base": (0.4, 0.5, 0.6), "good": (0.4, 0.7, 0.8), "poor": (0.4, 0.6, 0.3)}


def rows(arm, seeds=3, task="lake", success=True):
    """Evaluations at 0, 100 and 200 steps; the last of seed s is s hundredths higher than that of seed 0."""
    found = []
    for seed in range(seeds):
        for index, height in enumerate(HEIGHTS[arm]):
            value = height + (seed / 100 if index == 2 else 0)
            moment = (index * 6, index, index * 100, index * 2.5)
            share = value if success else None
            found.append(Row(task, arm, seed, *moment, "sampled", share, value, 64, "digest", "abc", 0.012))
    return found


def comparison(**fields):
    arms = {name: Arm() for name in HEIGHTS}
    return Comparison(
        **({"task": "lake", "stack": [], "arms": arms, "baseline": "base", "model": "m", "final_window": 1} | fields)
    )


def test_the_measures_of_a_curve():
    curve = Curve("a", 0, np.array([0.0, 1, 0.5, 0]), *(np.array([0.0, 100, 200, 400]),) * 3)
    assert (curve.final(1), curve.final(2)) == (0, 0.25)
    assert (curve.peak(1), curve.peak(2), curve.peak(9)) == (1, 0.75, 0.375)
    assert (curve.drop(1), curve.drop(2)) == (1, 0.5)
    assert curve.area(400) == pytest.approx((50 + 75 + 50) / 400)
    assert curve.area(300) == pytest.approx((50 + 75 + 37.5) / 300)
    assert (curve.reached(1), curve.reached(0), curve.reached(1.1)) == (1, 0, None)
    single = Curve("a", 0, np.array([0.0, np.float32(0.9)]), *(np.array([0.0, 100]),) * 3)
    assert single.reached(0.9) == 1
    np.testing.assert_allclose(curve.at("update", np.array([50.0, 300])), [0.5, 0.25])


def test_runs_that_get_to_the_threshold_at_the_same_evaluation_are_a_tie_however_long_their_episodes_are():
    longer = [dataclasses.replace(row, environment_steps=row.environment_steps * 11 // 10) for row in rows("base")]
    curves = curves_of([*longer, *rows("good")], "success", "sampled")
    at_once = measure(curves, comparison(threshold=0.8)).outcomes[STEPS]
    found = at_once["good"].less(at_once["base"])
    assert (found.estimate.value, found.above, found.below) == (-10, 0, 0)
    later = measure(curves, comparison(threshold=0.95)).outcomes[STEPS]
    found = later["good"].less(later["base"])
    assert (found.estimate.value, found.above, found.below) == (-100, 0, 3)


def test_evaluations_without_an_update_between_them_stay_in_the_order_of_iterations():
    late, early = (dataclasses.replace(row, update=6) for row in reversed(rows("base", seeds=1)[1:]))
    (curve,) = curves_of([rows("base", seeds=1)[0], late, early], "success", "sampled")
    assert curve.values.tolist() == [0.4, 0.5, 0.6]


def test_the_threshold_is_a_share_of_the_baseline_and_runs_that_never_reach_it_are_censored():
    curves = curves_of([*rows("base"), *rows("good"), *rows("poor")], "success", "sampled")
    found = measure(curves, comparison())
    assert found.threshold == pytest.approx(0.9 * 0.61)
    assert found.outcomes[STEPS]["base"].by_seed == {0: 200, 1: 200, 2: 200}
    assert found.outcomes[STEPS]["good"].by_seed == {0: 100, 1: 100, 2: 100}
    assert found.outcomes[STEPS]["good"].censored == 0
    assert found.outcomes[FINAL]["good"].estimate.value == pytest.approx(0.81)
    assert found.outcomes[DROP]["poor"].estimate.value == pytest.approx(0.29)
    assert found.outcomes[AREA]["base"].estimate.value == pytest.approx((0.45 + 0.555) / 2)
    high = measure(curves, comparison(threshold=1.1))
    assert (high.outcomes[STEPS]["poor"].censored, high.outcomes[STEPS]["good"].censored) == (3, 0)
    assert high.outcomes[STEPS]["poor"].by_seed == {0: 200, 1: 200, 2: 200}
    assert high.outcomes[STEPS]["good"].less(high.outcomes[STEPS]["poor"]).estimate.value == -100


def test_two_runs_that_never_get_there_are_equal_however_long_their_episodes_were():
    poor = rows("poor")
    longer = [dataclasses.replace(row, arm="good", environment_steps=2 * row.environment_steps) for row in poor]
    found = measure(curves_of([*rows("base"), *poor, *longer], "success", "sampled"), comparison(threshold=1.1))
    assert found.outcomes[STEPS]["good"].by_seed == found.outcomes[STEPS]["poor"].by_seed == {0: 200, 1: 200, 2: 200}
    difference = found.outcomes[STEPS]["good"].less(found.outcomes[STEPS]["poor"])
    assert (difference.estimate.value, difference.above, difference.below) == (0, 0, 0)
    late = [dataclasses.replace(row, arm="good", environment_steps=3 * row.environment_steps) for row in rows("good")]
    after = measure(curves_of([*rows("base"), *late], "success", "sampled"), comparison())
    assert (after.outcomes[STEPS]["good"].by_seed[0], after.outcomes[STEPS]["good"].censored) == (200, 3)


def test_differences_are_shown_from_every_reference_and_the_other_mode_stands_beside(tmp_path):
    greedy = [dataclasses.replace(row, mode="greedy", success=0.125) for row in [*rows("base"), *rows("good")]]
    table = [*rows("base"), *rows("good"), *greedy]
    page = write_report(table, comparison(references=["good"]), tmp_path, {}).read_text()
    assert page.index("## Differences from base") < page.index("## Differences from good")
    assert "final-window mean, greedy" in page
    assert "0.125 [0.125, 0.125]" in page
    assert "Runs start at" not in page
    assert "The first evaluation is 0.400 on average. Each is of 64 held-out episodes" in page
    assert "a standard error of up to 0.062" in page
    assert "Runs start at 0.400" in write_report(table, comparison(threshold=0.5), tmp_path, {}).read_text()


def test_other_arms_do_not_move_the_threshold():
    base, more = (
        curves_of(table, "success", "sampled") for table in (rows("base"), [*rows("base"), *rows("good", seeds=1)])
    )
    assert measure(base, comparison()).threshold == measure(more, comparison()).threshold


def test_returns_below_0_have_no_threshold():
    below = [dataclasses.replace(row, score=row.score - 5) for row in rows("base")]
    found = measure(curves_of(below, "return", "sampled"), comparison(metric="return"))
    assert found.threshold is None
    assert STEPS not in found.outcomes


def test_the_page_has_every_arm_the_censored_runs_and_those_that_are_not_there(tmp_path):
    page = write_report(
        [*rows("base"), *rows("good"), *rows("poor", seeds=2)],
        comparison(threshold=1.05),
        tmp_path,
        {"poor, seed 2": "exit code 1"},
    ).read_text()
    assert {"final.png", "curves.png", "arms.png", "report.md"} == {path.name for path in tmp_path.iterdir()}
    lines = page.splitlines()
    assert [sum(line.startswith(f"| {arm} |") for line in lines) for arm in HEIGHTS] == [1, 2, 2]
    (poor,) = [line for line in lines if line.startswith("| poor | 2 |")]
    assert "≥ 200 [200, 200], 0 of 2 reached it" in poor
    (better,) = [line for line in lines if line.startswith("| good | +0.200")]
    assert "3 above, 0 below of 3, p 0.25" in better
    assert "2 to 3 seeds per arm" in page
    assert "too narrow" in page
    assert "- poor, seed 2: exit code 1" in page
    assert "Made with code abc." in page
    assert poor.endswith("| 0.012 | 12 | 200 | 0.08 |")
    assert "up to 200, the fewest that a run ended with (base, seed 0)" in page


def test_a_page_of_one_seed_has_no_intervals(tmp_path):
    page = write_report([*rows("base", 1), *rows("good", 1)], comparison(), tmp_path, {}).read_text()
    assert "| good | +0.200, 1 above, 0 below of 1, p 1 |" in page
    assert "1 seed per arm. " in page
    assert "A single seed has no interval" in page


def test_a_comparison_in_which_nothing_was_learned_says_so(tmp_path):
    flat = [dataclasses.replace(row, success=0.25) for row in [*rows("base"), *rows("good")]]
    warning = "**Every evaluation of every run is 0.250: nothing was learned, or nothing was left to learn"
    assert warning in write_report(flat, comparison(), tmp_path, {}).read_text()
    moved = [*flat[:-1], dataclasses.replace(flat[-1], success=0.5)]
    assert "nothing was learned" not in write_report(moved, comparison(), tmp_path, {}).read_text()


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = [*rows("base"), *rows("poor", success=False)]
    write_table(tmp_path / "t.csv", table)
    assert read_table(tmp_path / "t.csv") == table
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="must have the columns task, arm, seed, update"):
        read_table(tmp_path / "other.csv")
    with pytest.raises(ConfigurationError, match="is not a file"):
        read_table(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"success": 1.7}, r"line 2: success=1\.7 must be from 0 to 1, or empty"),
        ({"mode": "beam"}, "line 2: mode=beam must be sampled or greedy"),
        ({"score": float("nan")}, "line 2: return=nan must be a finite number"),
        ({"environment_steps": -5}, "line 2: environment_steps=-5 must be a number of at least 0"),
        ({"seconds": float("nan")}, "line 2: seconds=nan must be a number of at least 0"),
        ({"episodes": 0}, "line 2: episodes=0 must be at least 1"),
        ({"episodes": 1.5}, r"line 2: episodes=1\.5 must be a whole number"),
        ({"learning_rate": float("nan")}, "line 2: learning_rate=nan must be a number of at least 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_column(tmp_path, changes, message):
    write_table(tmp_path / "table.csv", [dataclasses.replace(rows("base")[0], **changes)])
    with pytest.raises(ConfigurationError, match=message):
        read_table(tmp_path / "table.csv")


def test_a_table_of_other_tasks_or_without_the_baseline_is_not_taken_for_more(tmp_path):
    with pytest.raises(ConfigurationError, match="must have rows of task=lake; it has river"):
        write_report(rows("base", task="river"), comparison(), tmp_path, {})
    page = write_report(rows("good"), comparison(), tmp_path, {}).read_text()
    assert "would be those of base, of which no run is here" in page
    assert "no result above 0" not in page


def test_a_metric_that_the_table_lacks_is_refused():
    with pytest.raises(ConfigurationError, match="metric=success must be return"):
        curves_of(rows("base", success=False), "success", "sampled")
    with pytest.raises(ConfigurationError, match="no evaluations of mode=greedy"):
        curves_of(rows("base"), "success", "greedy")


def test_curves_are_averaged_where_all_of_them_are():
    short = Curve("a", 0, np.array([0.0, 1]), *(np.array([10.0, 100]),) * 3)
    long = Curve("a", 1, np.array([0.0, 2]), *(np.array([0.0, 200]),) * 3)
    places, values = on_common_places([short, long], "seconds")
    assert (places[0], places[-1]) == (10, 100)
    np.testing.assert_allclose(values[:, -1], [1, 1])
    later = Curve("a", 1, np.array([0.0, 2]), *(np.array([150.0, 200]),) * 3)
    assert on_common_places([short, later], "seconds")[0].size == 0


@pytest.mark.parametrize(
    ("shares", "other"),
    [((115 / 256, 116 / 256, 77 / 256), (143 / 256, 70 / 256, 95 / 256)), ((0.1, 0.2, 0.3), (0.2, 0.2, 0.2))],
)
def test_equal_means_are_ties_in_single_precision_too(shares, other, tmp_path):
    """Evaluations of equal sums, as a log holds them."""
    table = [
        dataclasses.replace(row, arm=arm, success=float(np.float32(share)), score=0.0)
        for arm, values in {"base": shares, "good": other}.items()
        for row, share in zip(rows("base", 1), values, strict=True)
    ]
    write_table(tmp_path / "table.csv", table)
    curves = curves_of(read_table(tmp_path / "table.csv"), "success", "sampled")
    found = measure(curves, comparison(final_window=3)).outcomes[FINAL]
    difference = found["good"].less(found["base"])
    assert (difference.above, difference.below) == (0, 0)
