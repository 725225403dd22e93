import io
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay.arena import SMALLEST_SEGMENT, Arena
from freshper_lightning.replay.codec import decode, encode
from freshper_lightning.replay.content import ROW_BYTES
from freshper_lightning.replay.storage import TrajectoryStore
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import TENSORS, assert_same, make_buffer, make_trajectory, trajectories


def stored(items, **parameters):
    store = TrajectoryStore(**parameters)
    return store, store.add(store.stage(items))


@given(st.lists(trajectories(), max_size=5))
def test_what_comes_out_is_what_came_in_bit_for_bit(items):
    store, handles = stored(items)
    for item, copy in zip(items, store.get(handles), strict=True):
        assert_same(item, copy)


@given(st.lists(trajectories(), max_size=5))
def test_a_packed_store_survives_a_safe_load(items):
    store, handles = stored(items)
    file = io.BytesIO()
    torch.save(store.packed(handles), file)
    file.seek(0)
    other = TrajectoryStore()
    restored = other.load(torch.load(file, weights_only=True))
    assert other.nbytes == store.nbytes
    for item, copy in zip(items, other.get(restored), strict=True):
        assert_same(item, copy)


def test_a_packed_store_is_contiguous_tensors_that_do_not_change_with_it():
    store, handles = stored([make_trajectory(images=(b"a", b"bc")), make_trajectory()])
    packed = store.packed(handles)
    before = {name: column.clone() for name, column in packed.items()}
    store.remove(handles)
    store.add(store.stage([make_trajectory(rewards=(9.0,), images=(b"x",))] * 2))
    for name, column in packed.items():
        assert column.is_contiguous(), name
        assert torch.equal(column, before[name]), name


def test_changing_what_came_out_does_not_change_what_is_stored():
    store, handles = stored([make_trajectory(advantages=(1.0,))] * 2)
    for copy in store.get(handles):
        for name in TENSORS:
            getattr(copy, name).zero_()
    assert_same(store.get(handles)[1], make_trajectory(advantages=(1.0,)))


def test_the_fields_of_a_trajectory_can_be_views_of_anything():
    item = make_trajectory(rewards=(1.0, 2.0))
    strided = torch.stack([item.token_ids, item.token_ids], dim=1)[:, 0]
    trained = item.rewards.clone().requires_grad_()
    store, handles = stored([replace(item, token_ids=strided, rewards=trained)])
    assert_same(store.get(handles)[0], item)


def test_task_names_are_one_object():
    store, handles = stored([make_trajectory(task="".join(["to", "y"])) for _ in range(2)])
    one, other = store.get(handles)
    assert one.task is other.task


def test_float16_log_probs_take_half_the_room_and_are_rounded():
    item = make_trajectory(rewards=(1.0,), turn_tokens=(400,))
    item.behavior_log_probs.copy_(-torch.rand(400) * 20)
    full, half = stored([item])[0], stored([item], log_probs="float16")
    assert full.nbytes - half[0].nbytes == 2 * 400
    (copy,) = half[0].get(half[1])
    assert copy.behavior_log_probs.dtype == torch.float32
    assert torch.allclose(copy.behavior_log_probs, item.behavior_log_probs, rtol=2**-11, atol=1e-7)
    assert_same(replace(copy, behavior_log_probs=item.behavior_log_probs), item)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("token_ids", torch.int64), ("rewards", torch.float64), ("behavior_log_probs", torch.bfloat16)],
)
def test_a_tensor_of_another_type_is_refused_by_name(name, dtype):
    item = make_trajectory()
    with pytest.raises(ValueError, match=f"{name} .* not {dtype}"):
        TrajectoryStore().stage([make_trajectory(), replace(item, **{name: getattr(item, name).to(dtype)})])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seed": 2**63}, f"seed={2**63}"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"group": 4.0, "member": None}, "group=4.0, member=None"),
        ({"born": ClockReading(updates=1.0)}, "born.updates=1.0"),
    ],
)
def test_an_integer_that_does_not_fit_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=f"^{named} of a trajectory must fit in a signed 64-bit integer"):
        TrajectoryStore().stage([make_trajectory(**fields)])


def test_a_log_prob_below_the_range_of_float16_is_refused_and_one_near_0_is_rounded():
    item = make_trajectory(turn_tokens=(3,))
    item.behavior_log_probs.copy_(torch.tensor([-1e-8, -1e-6, -float("inf")]))
    store, handles = stored([item], log_probs="float16")
    found = store.get(handles)[0].behavior_log_probs
    assert (found[:2] - item.behavior_log_probs[:2]).abs().max() <= 2**-25
    assert found[2] == -float("inf")
    item.behavior_log_probs[1] = -7e4
    with pytest.raises(ValueError, match=r"behavior_log_probs of a trajectory must be at least -65504 .* not -70000"):
        store.stage([item])
    assert_same(stored([item])[0].get(np.array([0]))[0], item)


def test_a_block_is_a_multiple_of_eight_bytes_and_does_not_depend_on_where_it_lies():
    (block,) = encode([make_trajectory(task="a name")], [[]])
    assert len(block) % 8 == 0
    moved = np.frombuffer(bytes(8) + block, np.uint8)[8:].copy()
    assert_same(decode(moved, bytes), make_trajectory(task="a name"))


def test_equal_images_are_stored_once_and_as_long_as_a_trajectory_shows_them():
    a, b = bytes(1000), b"b" * 1001
    store, handles = stored([make_trajectory(images=(a, b, a)), make_trajectory(images=(a,)), make_trajectory()])
    with_both = store.image_nbytes
    assert 2001 <= with_both <= 2001 + 2 * 32
    bare = stored([make_trajectory()] * 3)[0].nbytes
    assert store.nbytes == bare + with_both + 4 * 16
    assert store.get(handles)[0].images == (a, b, a)
    store.remove(handles[:1])
    assert 1000 <= store.image_nbytes <= 1032
    store.add(store.stage([make_trajectory(images=(b, a))]))
    assert store.image_nbytes == with_both
    assert store.get(handles[1:])[0].images == (a,)


@pytest.mark.parametrize("turns", [1, 10])
@pytest.mark.parametrize(("tokens", "most"), [(512, 10.0), (4096, 8.5)])
def test_bytes_per_token_are_bounded_even_where_every_token_is_sampled(tokens, turns, most):
    lengths = tuple(tokens // turns - 1 for _ in range(turns))
    item = make_trajectory((1.0,) * turns, lengths, (0.5,) * turns, task="frozen lake with a long name")
    assert (stored([item])[0].nbytes + ROW_BYTES) / item.num_tokens <= most


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=150), st.randoms(use_true_random=False))
def test_an_arena_keeps_what_is_alive_and_not_much_more(steps, random):
    arena, alive = Arena(), {}
    for size, add in steps:
        if add or not alive:
            blocks = [bytes([random.randrange(256)]) * 8 * size for _ in range(random.randrange(1, 4))]
            sizes = np.array([len(block) for block in blocks])
            handles = arena.append(np.frombuffer(b"".join(blocks), np.uint8), sizes)
            assert not set(handles.tolist()) & set(alive)
            alive.update(zip(handles.tolist(), blocks, strict=True))
        else:
            gone = random.sample(sorted(alive), random.randrange(1, len(alive) + 1))
            arena.free(np.array(gone))
            for handle in gone:
                del alive[handle]
        handles = np.array(sorted(alive), np.int64)
        assert [block.tobytes() for block in arena.read(handles)] == [alive[handle] for handle in handles.tolist()]
        assert arena.gather(handles).tobytes() == b"".join(alive[handle] for handle in handles.tolist())
        size = sum(map(len, alive.values()))
        assert (len(arena), arena.nbytes) == (len(alive), size)
    size, table = sum(map(len, alive.values())), 20 * len(arena._segment)
    assert arena.allocated - table <= 2 * size + 2 * SMALLEST_SEGMENT + 3 * 24_000


@pytest.mark.parametrize(("log_probs", "most"), [("float32", 10.0), ("float16", 8.0)])
def test_held_bytes_per_token_are_bounded_even_where_every_token_is_sampled(log_probs, most):
    items = [make_trajectory((1.0,) * 10, (50,) * 10, (0.5,) * 10, group=k) for k in range(100)]
    buffer = make_buffer(capacity=6000, log_prob_dtype=log_probs)
    for _ in range(200):
        buffer.add(items, ClockReading())
        if len(buffer) >= 2000:
            assert buffer.allocated <= most * len(buffer) * items[0].num_tokens, len(buffer)


def test_held_bytes_stay_close_to_what_is_stored_whatever_goes():
    random, items = np.random.default_rng(0), [make_trajectory((1.0,), (int(k),)) for k in range(100, 200)]
    buffer = make_buffer(capacity=2000, eviction="lowest")
    for _ in range(80):
        buffer.add(items, ClockReading(), priorities=random.random(100))
        if len(buffer) == 2000:
            assert buffer.allocated <= 1.4 * buffer.nbytes


FULL_DISK = """
import sys
from pathlib import Path
from tests.replay.builders import START, assert_same, make_buffer, make_trajectory

folder = Path(sys.argv[1])
items = [make_trajectory((1.0,), (9000,), group=k, images=(bytes([k]) * 9000,)) for k in range(60)]
buffer = make_buffer(memory_map=folder, capacity=50)
while True:
    for item in items:
        before, size = buffer.ids().tolist(), buffer.nbytes
        try:
            buffer.add([item], START)
        except OSError as error:
            assert error.errno == 28, error
            break
    else:
        raise SystemExit("the disk never was full")
    break
assert buffer.ids().tolist() == before and buffer.nbytes == size
for copy in buffer.get(before):
    assert_same(copy, items[copy.group])
buffer.unpin()
assert len(buffer.sample(8, START, 0.4).trajectories) == 8
print("whole", len(before))
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="mounts a small disk in a namespace of its own")
def test_a_full_disk_is_an_error_that_changes_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    (disk := tmp_path / "disk").mkdir()
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    command = 'mount -t tmpfs -o size=1500k tmpfs "$1" || exit 77; shift; exec "$@"'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [*mounted, command, "sh", str(disk), sys.executable, str(script), str(disk)]
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=120)
    if result.returncode == 77 or result.stderr.startswith("unshare:"):
        pytest.skip("no namespace of its own to be had here")
    assert (result.returncode, result.stdout[:5]) == (0, "whole"), result.stderr


def test_blocks_of_a_wrong_size_are_refused():
    for sizes in ([7], [8, 8], [0, 8]):
        with pytest.raises(ValueError, match="multiples of 8"):
            Arena().append(np.zeros(8, np.uint8), np.array(sizes))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the maps of the process")
def test_a_mapped_arena_holds_its_bytes_in_files_that_vanish(tmp_path):
    store, handles = stored([make_trajectory(images=(b"png",))] * 3, directory=tmp_path)
    assert_same(store.get(handles)[2], make_trajectory(images=(b"png",)))
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    packed = store.packed(handles)
    del store
    other = TrajectoryStore()
    assert_same(other.get(other.load(packed))[0], make_trajectory(images=(b"png",)))
