import math

import numpy as np
import pytest
import torch

from freshper_lightning.algorithms.ess import ess_ratio
from freshper_lightning.study.bootstrap import Estimate, resamples
from freshper_lightning.study.divergence import divergence, ess_bound, staleness


def ratios(groups, members, tokens, make):
    return [[make(tokens) for _ in range(members)] for _ in range(groups)]


def test_data_of_the_current_policy_are_worth_themselves():
    found = staleness(ratios(4, 3, 5, torch.zeros), resamples(4, 20, seed=0))
    for level in ("token", "geometric", "sequence"):
        for name, value in {f"ess_{level}": 1.0, f"gaussian_ess_{level}": 1.0, f"variance_{level}": 0.0}.items():
            assert [found[name].value, found[name].low, found[name].high] == pytest.approx([value] * 3)
    assert found["kl_behavior_current"].value == found["clip_share"].value == 0.0


def test_gaussian_log_ratios_have_the_effective_size_of_their_variance_and_half_of_it_as_divergence():
    variance, tokens = 0.02, 4
    generator = torch.Generator().manual_seed(0)

    def normal(count):
        return variance**0.5 * torch.randn(count, generator=generator) - variance / 2

    found = staleness(ratios(500, 8, tokens, normal), resamples(500, 50, seed=0))
    for level, spread in {"token": variance, "geometric": variance / tokens, "sequence": variance * tokens}.items():
        assert found[f"variance_{level}"].value == pytest.approx(spread, rel=0.05)
        assert found[f"ess_{level}"].value == pytest.approx(math.exp(-spread), rel=0.01)
        assert found[f"gaussian_ess_{level}"].value == pytest.approx(math.exp(-spread), rel=0.01)
    assert found["kl_behavior_current"].value == pytest.approx(variance / 2, rel=0.05)
    assert found["kl_behavior_current_sequence"].value == pytest.approx(tokens * variance / 2, rel=0.05)


def test_levels_differ_in_what_a_log_ratio_is_of():
    groups = [[torch.tensor([0.3, -0.1]), torch.tensor([0.5])], [torch.tensor([0.0, 0.4, 0.2])]]
    found = staleness(groups, resamples(2, 5, seed=0))
    levels = {"token": [0.3, -0.1, 0.5, 0.0, 0.4, 0.2], "sequence": [0.2, 0.5, 0.6], "geometric": [0.1, 0.5, 0.2]}
    for level, values in levels.items():
        assert found[f"ess_{level}"].value == pytest.approx(ess_ratio(torch.tensor(values)), rel=1e-6)
        assert found[f"variance_{level}"].value == pytest.approx(np.var(values), rel=1e-5)
    assert found["clip_share"].value == pytest.approx(4 / 6), "0.3, 0.5, 0.4 and 0.2 are beyond log 1.2"


def test_a_divergence_per_episode_is_the_sum_over_its_tokens():
    groups = [[torch.tensor([0.3, -0.1])], [torch.tensor([0.5, 0.1, 0.2, 0.2])]]
    found = divergence("kl", groups, resamples(2, 5, seed=0))
    assert found["kl_sequence"].value == pytest.approx(3 * found["kl"].value)


def test_the_bound_of_the_effective_size_is_of_the_divergence_of_the_current_policy():
    """Two actions, of probability 0.5 under the behavior policy, 0.9 and 0.1 under the current one."""
    behavior, current = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    fresh = [[(behavior / current).log()[action : action + 1]] for action in [0] * 9 + [1]]
    stale = [[(current / behavior).log()[action : action + 1]] for action in [0] * 5 + [1] * 5]
    once = np.arange(10)[None]
    kl = divergence("kl", fresh, once)["kl_sequence"]
    share = staleness(stale, once)["ess_sequence"].value
    assert kl.value == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert share == pytest.approx(1 / (0.5 * 1.8**2 + 0.5 * 0.2**2))
    assert ess_bound(kl).value > share
    assert ess_bound(divergence("kl", stale, once)["kl_sequence"]).value < share, "the other direction is no bound"


def test_the_ends_of_the_bound_change_places():
    found = ess_bound(Estimate(0.5, 0.25, 1.0))
    assert [found.value, found.low, found.high] == pytest.approx([math.exp(-0.5), math.exp(-1), math.exp(-0.25)])
