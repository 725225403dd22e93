import os

import numpy as np
import pytest
import torch

from freshper_lightning.replay import ExponentialDecay, Learnability, UniformPriority, read_state, reshard, write_state
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import assert_same, make_buffer, make_trajectory, of_rewards

NOW = ClockReading(updates=30)


def filled(rank, groups, **parameters):
    buffer = make_buffer(decay=ExponentialDecay(tau=7), alpha=0.6, **parameters)
    for step in range(groups):
        group, images = 10 * rank + step, (b"shared", bytes([step])) if step % 2 else ()
        items = [
            make_trajectory(
                (1.0 + step + member,), group=group, member=member, seed=group, success=bool(member), images=images
            )
            for member in range(2)
        ]
        buffer.add(items, ClockReading(updates=3 * step + rank))
    if groups:
        buffer.update_priorities([0], [4.5])
        buffer.observe([1], [-0.3], ClockReading(updates=20))
        buffer.pin([1])
        buffer.sample(2, NOW, beta=0.4)
    return buffer


def global_shares(buffers):
    """Share of every trajectory, told apart by group and member, in the mass of all buffers at one scale."""
    parts = []
    for buffer in buffers:
        masses, columns = buffer._masses_at(NOW), buffer._content.columns
        scale = 0.6 * (masses.scale.high + masses.scale.low - (NOW.updates - masses.scale.reference) / 7)
        parts += zip(buffer.get(buffer.ids()), masses.of(columns.live_rows()) * np.exp(scale), strict=True)
    total = sum(mass for _, mass in parts)
    return {(item.group, item.member): (item, mass / total) for item, mass in parts}


@pytest.mark.parametrize(("before", "after"), [([5, 3], 3), ([4, 0, 2], 1), ([6], 4), ([2, 2], 2)])
def test_resharding_keeps_every_trajectory_and_its_share_of_the_mass(before, after):
    old = [filled(rank, groups) for rank, groups in enumerate(before)]
    shards = reshard([buffer.state_dict() for buffer in old], after)
    new = [make_buffer(decay=ExponentialDecay(tau=7), alpha=0.6) for _ in shards]
    for buffer, shard in zip(new, shards, strict=True):
        buffer.load_state_dict(shard.state)
        for copy, (rank, key) in zip(buffer.get(buffer.ids()), shard.origins.tolist(), strict=True):
            assert_same(copy, old[rank].get([key])[0])
    one, other = global_shares(old), global_shares(new)
    assert one.keys() == other.keys()
    for key, (_, share) in one.items():
        assert other[key][1] == pytest.approx(share, rel=1e-12)
    sizes = [len(buffer) for buffer in new]
    assert (sum(sizes), max(sizes) - min(sizes) <= 2) == (2 * sum(before), True)
    assert sum(len(buffer.pinned()) for buffer in new) == sum(groups > 0 for groups in before)
    for buffer in new:
        assert {item.member for item in buffer.get(buffer.ids())} in ({0, 1}, set())
        assert (np.diff(buffer.ages(NOW)) <= 0).all() or len(buffer.pinned())


def test_resharding_keeps_success_rates_and_stores_a_shared_image_once():
    old = [filled(rank, 4, priority=Learnability()) for rank in range(2)]
    new = make_buffer(priority=Learnability())
    shard = reshard([buffer.state_dict() for buffer in old], 3)[0]
    new.load_state_dict(shard.state)
    for (group, member), (item, _) in global_shares(old).items():
        assert (group, member) == (item.group, item.member)
    assert len(new._rates) == 8
    new.add([make_trajectory((1.0,), seed=2, success=False)], NOW)
    counted = new._rates._counts["toy", 2]
    assert counted == (pytest.approx(1 / 3), pytest.approx(2 / 3 + 1))
    images = {name for item in new.get(new.ids()) for name in item.images}
    assert len(new._content.store._images) == len(images)


@pytest.mark.parametrize("after", [1, 3])
def test_evictions_of_all_runs_are_counted_on(after):
    old = [make_buffer(capacity=3) for _ in range(2)]
    for count in (3, 3, 2):
        for buffer in old[: count - 1]:
            buffer.add(of_rewards(*range(count)), NOW)
    new = [make_buffer() for _ in range(after)]
    for buffer, shard in zip(new, reshard([buffer.state_dict() for buffer in old], after), strict=True):
        buffer.load_state_dict(shard.state)
    assert sum(buffer.evicted() for buffer in new) == sum(buffer.evicted() for buffer in old) == 8


def test_states_that_do_not_belong_together_are_refused():
    one, other = filled(0, 1).state_dict(), filled(0, 1, priority=UniformPriority()).state_dict()
    with pytest.raises(ValueError, match="priority of the saved replay buffers must be one and the same"):
        reshard([one, other], 2)
    with pytest.raises(ValueError, match="shards must be at least 1, not 0"):
        reshard([one], 0)
    with pytest.raises(ValueError, match="number of states must be at least 1"):
        reshard([], 1)


def test_a_state_goes_through_a_file(tmp_path):
    buffer, restored, path = filled(0, 3), make_buffer(decay=ExponentialDecay(tau=7), alpha=0.6), tmp_path / "replay.pt"
    write_state(buffer.state_dict(), path)
    restored.load_state_dict(read_state(path))
    assert restored.probabilities(NOW).tobytes() == buffer.probabilities(NOW).tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["replay.pt"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_state({"x": torch.ones(3)}, tmp_path / "replay.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "replay.pt").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_refused_by_name(tmp_path, share):
    path = tmp_path / "replay.pt"
    write_state(filled(0, 3).state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"replay.pt must be the whole file"):
        read_state(path)


def test_a_failed_write_leaves_the_old_state(tmp_path):
    path = tmp_path / "replay.pt"
    write_state({"x": torch.ones(3)}, path)
    with pytest.raises(AttributeError):
        write_state({"x": lambda: 0}, path)
    assert read_state(path)["x"].tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["replay.pt"]
