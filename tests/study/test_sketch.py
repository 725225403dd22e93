"""Sketches keep inner products, which is all that is asked of gradients."""

import math

import torch

from freshper_lightning.study.sketch import CountSketch

PARAMETERS, DIMENSION = 20_000, 1024


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    one, other = torch.randn(2, PARAMETERS, generator=generator)
    return one, 0.6 * one + 0.8 * other


def test_inner_products_are_unbiased_and_as_far_off_as_said():
    one, other = pair()
    scale = float(one.norm() * other.norm())
    sketches = [CountSketch(PARAMETERS, DIMENSION, seed) for seed in range(200)]
    errors = torch.tensor([float(sketch(one) @ sketch(other) - one @ other) / scale for sketch in sketches])
    said = math.sqrt(2 / DIMENSION)
    assert abs(errors.mean()) < 4 * said / math.sqrt(len(errors))
    assert 0.5 * said < errors.std() < 1.1 * said


def test_a_sketch_is_linear():
    one, other = pair()
    sketch = CountSketch(PARAMETERS, DIMENSION)
    torch.testing.assert_close(sketch(2 * one - other), 2 * sketch(one) - sketch(other), rtol=1e-4, atol=1e-4)


def test_what_is_short_enough_stays_as_it_is():
    one, _ = pair()
    assert torch.equal(CountSketch(PARAMETERS, PARAMETERS)(one), one)
