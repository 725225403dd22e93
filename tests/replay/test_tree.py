from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay import tree
from freshper_lightning.replay.schemes import stratified
from freshper_lightning.replay.tree import BLOCK, TOP, BlockSums

tops = st.sampled_from([1, 4, TOP])
"""So that few masses have several levels too."""
some_masses = st.lists(st.just(0.0) | st.floats(1e-12, 1) | st.floats(1, 1e3), min_size=1, max_size=200)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e6)), min_size=1, max_size=40),
    st.integers(1, 5),
    tops,
    st.sampled_from([0, 512]),
)
def test_sums_do_not_depend_on_how_the_masses_came_about(writes, pieces, top, few):
    with patch.object(tree, "TOP", top), patch.object(tree, "_FEW", few):
        sums, plain, end = BlockSums(np.empty(0)), {}, 0
        for part in np.array_split(np.array(writes), pieces):
            if len(part) == 0:
                continue
            last = {int(row): mass for row, mass in part.tolist()}
            plain, end = plain | last, max(end, *(row + 1 for row in last))
            sums.write(np.array(list(last)), np.array(list(last.values())), end)
        masses = np.zeros(end)
        masses[list(plain)] = list(plain.values())
        built = BlockSums(masses)
    assert built.total == sums.total == pytest.approx(masses.sum(), rel=1e-14)
    shares = np.linspace(0, 1, 30)
    if built.total > 0:
        assert built.find(shares).tolist() == sums.find(shares).tolist()


def find(masses, shares, top):
    with patch.object(tree, "TOP", top):
        return BlockSums(masses).find(shares)


@given(some_masses.filter(any), st.lists(st.floats(0, 1), min_size=1, max_size=20), tops)
def test_rows_are_found_where_the_running_sum_passes_a_share_and_never_without_mass(masses, shares, top):
    masses, shares = np.array(masses), np.array(shares)
    rows = find(masses, shares, top)
    assert (masses[rows] > 0).all()
    running = np.cumsum(masses)
    tolerance = 1e-12 * running[-1]
    assert (running[rows] >= shares * running[-1] - tolerance).all()
    assert (running[rows] - masses[rows] <= shares * running[-1] + tolerance).all()


@pytest.mark.parametrize("top", [1, 4, TOP])
def test_the_last_row_of_a_block_and_of_all_can_be_found(top):
    masses = np.zeros(3 * BLOCK + 1)
    masses[[BLOCK - 1, BLOCK, 3 * BLOCK]] = 1.0
    shares = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert find(masses, shares, top).tolist() == [BLOCK - 1] * 2 + [BLOCK] * 2 + [3 * BLOCK] * 2


def test_a_large_tree_finds_what_a_running_sum_finds():
    masses = np.random.default_rng(0).random(70_000)  # three levels
    shares = np.linspace(0, 1, 1001)
    assert (find(masses, shares, TOP) == stratified(masses, shares)).all()


@given(some_masses.filter(any), st.integers(1, 64), st.integers(0, 2**32), tops)
def test_a_stratified_count_is_within_two_of_its_expectation(masses, n, seed, top):
    masses = np.array(masses)
    shares = (np.arange(n) + np.random.default_rng(seed).random(n)) / n
    for rows in (find(masses, shares, top), stratified(masses, shares)):
        counts = np.bincount(rows, minlength=len(masses))
        assert len(counts) == len(masses)
        assert (np.abs(counts - n * masses / masses.sum()) < 2).all()
        assert (counts[masses == 0] == 0).all()
