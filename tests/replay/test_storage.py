import io
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay.storage import TrajectoryStore, nbytes_of, pack, unpack
from tests.replay.builders import TENSORS, assert_same, make_trajectory, trajectories


@given(st.lists(trajectories(), max_size=5))
def test_packing_returns_every_field_bit_for_bit(items):
    returned = unpack(pack(items))
    assert len(returned) == len(items)
    for item, copy in zip(items, returned, strict=True):
        assert_same(item, copy)


@given(st.lists(trajectories(), max_size=5))
def test_packed_columns_survive_a_safe_load(items):
    file = io.BytesIO()
    torch.save(pack(items), file)
    file.seek(0)
    for item, copy in zip(items, unpack(torch.load(file, weights_only=True)), strict=True):
        assert_same(item, copy)


def test_packed_columns_are_contiguous_tensors_and_primitives():
    packed = pack([make_trajectory(images=(b"a", b"bc")), make_trajectory(task="other")])
    for name, column in packed.items():
        if name == "tasks":
            assert column == ["toy", "other"]
        else:
            assert isinstance(column, torch.Tensor), name
            assert column.is_contiguous(), name


def test_each_unpacked_trajectory_owns_exactly_its_memory():
    for copy in unpack(pack([make_trajectory(advantages=(1.0,)) for _ in range(10)])):
        for name in TENSORS:
            tensor = getattr(copy, name)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_task_names_are_stored_once():
    one, other = unpack(pack([make_trajectory(task="".join(["to", "y"])), make_trajectory(task="".join(["to", "y"]))]))
    assert one.task is other.task


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("token_ids", torch.int64), ("rewards", torch.float64), ("behavior_log_probs", torch.bfloat16)],
)
def test_a_tensor_of_another_type_is_refused_by_name(name, dtype):
    item = make_trajectory()
    with pytest.raises(ValueError, match=f"{name} .* not {dtype}"):
        pack([make_trajectory(), replace(item, **{name: getattr(item, name).to(dtype)})])


def test_an_integer_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=f"seed .* not {2**63}"):
        pack([make_trajectory(seed=2**63)])


def test_columns_of_different_lengths_are_refused():
    packed = pack([make_trajectory(), make_trajectory()])
    packed["seed"] = packed["seed"][:1]
    with pytest.raises(ValueError, match="zip"):
        unpack(packed)


def test_bytes_count_tensors_images_and_numbers():
    bare = make_trajectory(rewards=(1.0, 2.0), turn_tokens=(3, 4))
    tensors = 9 * 4 + 2 * 2 * 4 + 7 * 4 + 2 * 4 + 2 * 8
    numbers = 4 * 8 + 3 * 8 + 2 * 8 + 8 + 2
    assert nbytes_of(bare) == tensors + numbers
    assert nbytes_of(replace(bare, advantages=torch.zeros(2))) == nbytes_of(bare) + 8
    assert nbytes_of(replace(bare, images=(b"abc", b"de"))) == nbytes_of(bare) + 5


def test_the_store_frees_what_it_removes():
    store = TrajectoryStore()
    store.add([3, 5], [make_trajectory(), make_trajectory(images=(b"abc",))])
    assert list(store.sizes()) == [nbytes_of(item) for item in store.get([3, 5])]
    store.remove([3])
    assert (len(store), store.nbytes) == (1, nbytes_of(store.get([5])[0]))
    with pytest.raises(KeyError, match="3"):
        store.get([5, 3])
