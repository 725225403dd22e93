import math

import pytest

from freshper_lightning.study.growth import fit_growth, local_exponents

AGES = (6, 12, 24, 48)


@pytest.mark.parametrize(("growth", "power", "tau"), [("linear", 1, 50.0), ("quadratic", 2, 50.0)])
def test_the_fit_of_the_right_power_explains_everything_and_the_other_one_does_not(growth, power, tau):
    variances = {0: 0.01} | {age: 0.01 + (age / tau) ** power for age in AGES}
    fit, r_squared = fit_growth(variances, growth)
    assert fit.tau_hat() == pytest.approx(tau)
    assert r_squared == pytest.approx(1.0)
    other = {"linear": "quadratic", "quadratic": "linear"}[growth]
    assert fit_growth(variances, other)[1] < 0.98
    absolute = dict(variances) | {AGES[0]: 2 * variances[AGES[0]]}
    assert fit_growth(absolute, growth)[1] < 0.95, "half of a small variance is as much as half of a large one"
    assert local_exponents(variances) == pytest.approx({(6, 12): power, (12, 24): power, (24, 48): power})


def test_nothing_is_explained_where_nothing_grows():
    fit, r_squared = fit_growth(dict.fromkeys((0, *AGES), 0.0), "linear")
    assert fit.rate == 0
    assert math.isnan(r_squared)
