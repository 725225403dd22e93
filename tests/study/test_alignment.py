import numpy as np
import pytest
import torch

from freshper_lightning.study.alignment import Alignment, Draws
from freshper_lightning.study.bootstrap import resamples
from freshper_lightning.study.gradients import Products, products

GROUPS, PARAMETERS = 64, 2000


def comparison() -> Alignment:
    return Alignment(GROUPS, tuple(resamples(GROUPS, 400, seed) for seed in range(3)))


def noisy(signal: torch.Tensor, groups: int, seed: int) -> torch.Tensor:
    """Gradients of groups, whose noise is four times the signal in length: half of the norm of a sum of 64."""
    noise = torch.randn(groups, PARAMETERS, generator=torch.Generator().manual_seed(seed)) * 4 / PARAMETERS**0.5
    return signal + noise


def pair(angle: float, seed: int) -> Products:
    signal, other = torch.zeros(2, PARAMETERS)
    signal[0] = 1.0
    other[0], other[1] = np.cos(angle), np.sin(angle)
    probe, fresh = noisy(other, GROUPS, seed), noisy(signal, 2 * GROUPS, seed + 1000)
    return Products(products(probe, probe), products(probe, fresh), products(fresh, fresh))


def test_a_fresh_probe_reaches_the_ceiling_and_points_in_the_same_direction():
    found = [(comparison().of_loss(p), comparison().ceiling(p.fresh)) for p in (pair(0.0, seed) for seed in range(20))]
    cosines, directions = ([loss[name].value for loss, _ in found] for name in ("cosine", "direction"))
    assert np.mean(cosines) == pytest.approx(np.mean([top.value for _, top in found]), abs=0.02)
    assert np.mean(directions) == pytest.approx(1.0, abs=0.03)
    assert np.mean([loss["norm_ratio"].value for loss, _ in found]) == pytest.approx(1.0, abs=0.03)
    covered = [loss["direction"].low <= 1.0 <= loss["direction"].high for loss, _ in found]
    assert sum(covered) >= 16


@pytest.mark.parametrize("angle", [0.8, np.pi / 2, np.pi])
def test_direction_is_the_cosine_without_the_noise(angle):
    found = [comparison().of_loss(pair(angle, seed)) for seed in range(20)]
    assert np.mean([loss["direction"].value for loss in found]) == pytest.approx(np.cos(angle), abs=0.05)
    raw = np.mean([loss["cosine"].value for loss in found])
    assert abs(raw) < abs(np.cos(angle)) or angle == np.pi / 2


def test_noise_alone_has_no_ceiling_to_speak_of():
    fresh = noisy(torch.zeros(PARAMETERS), 2 * GROUPS, seed=5)
    top = comparison().ceiling(products(fresh, fresh))
    assert top.low < 0.05
    assert abs(top.value) < 0.1


def test_a_norm_that_noise_hides_makes_no_direction_though_both_are_hidden():
    hidden = set()
    for seed in range(12):
        probe, fresh = (
            noisy(torch.zeros(PARAMETERS), GROUPS, seed),
            noisy(torch.zeros(PARAMETERS), 2 * GROUPS, seed + 50),
        )
        found = Products(products(probe, probe), products(probe, fresh), products(fresh, fresh))
        once = Draws.once(GROUPS)
        own = float(once.expected_squares(found.probe)[0])
        between = float(once.between(found.fresh[:GROUPS, GROUPS:], once)[0])
        hidden.add((own < 0, between < 0))
        assert np.isnan(comparison().of_loss(found)["direction"].value) == (own < 0 or between < 0)
    assert (True, True) in hidden


def test_norms_are_those_of_the_sum_and_resampling_adds_no_noise_to_them():
    gradients = noisy(torch.zeros(PARAMETERS), GROUPS, seed=3)
    own = products(gradients, gradients)
    once = Draws.once(GROUPS)
    assert once.norms(own)[0] == pytest.approx(float(gradients.sum(0).norm()), rel=1e-5)
    resampled = Draws.of(resamples(GROUPS, 2000, seed=0))
    assert np.square(resampled.norms(own)).mean() == pytest.approx(once.norms(own)[0] ** 2, rel=0.02)
