from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.rollout.seeds import (
    evaluation_instance_seed,
    sampling_seed,
    stable_hash,
    training_instance_seed,
)

PART = st.one_of(st.integers(), st.text())


@given(st.lists(PART, max_size=4), st.lists(PART, max_size=4))
def test_hashes_are_equal_exactly_when_the_parts_are(first, second):
    assert (stable_hash(*first) == stable_hash(*second)) == (first == second)
    assert 0 <= stable_hash(*first) < 2**63


def test_a_hash_is_a_fixed_number():
    assert stable_hash("sampling", 1, 2) == 8751712506442244594


def test_numbers_and_their_spellings_differ():
    assert stable_hash(1, 2) != stable_hash("1", "2") != stable_hash("1, 2")


def test_every_reply_has_a_seed_of_its_own():
    keys = [(0, iteration, group, member) for iteration in range(4) for group in range(4) for member in range(4)]
    seeds = {sampling_seed(key, turn) for key in keys for turn in range(10)}
    assert len(seeds) == 4 * 4 * 4 * 10


@given(st.integers(0), st.integers(0), st.integers(0), st.integers(0), st.integers(0))
def test_training_and_evaluation_instances_never_meet(run_seed, iteration, group, instances, index):
    training, evaluation = (
        training_instance_seed(run_seed, iteration, group),
        evaluation_instance_seed(instances, index),
    )
    assert training % 2 == 0
    assert evaluation % 2 == 1
    assert max(training, evaluation) < 2**63
