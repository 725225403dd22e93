import pytest
import torch

from tests.rollout.playing import BORN, SLOW, Slow, is_slow, plans

pytestmark = pytest.mark.parametrize("play", ["streaming"], indirect=True)


def test_a_slow_environment_holds_up_nothing_but_itself(collector):
    Slow.begin(others=3)
    trajectories = collector(SLOW, threads=4).collect(plans(size=1), BORN).trajectories
    assert [t.seed for t in trajectories] == [100, 101, 102, 103]
    slow = [event for event in Slow.events if is_slow(event[1])]
    assert [what for what, _ in slow] == ["reset", "step", "step", "done"]
    assert Slow.events[-4:] == slow
    assert 1 < Slow.most <= 4


def test_plays_the_same_episodes_as_in_lock_step_up_to_rounding(collector):
    streamed = collector().collect(plans(), BORN).trajectories
    for one, other in zip(collector(play="lock_step").collect(plans(), BORN).trajectories, streamed, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.behavior_log_probs, other.behavior_log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failing_environment_costs_its_group(collector, engine, fails_at):
    playing = collector(fails_at=fails_at, bad_seeds=(102,), max_failure_share=0.5)
    told = []
    collection = playing.collect(plans(), BORN, progress=told.append)
    assert [t.group for t in collection.trajectories] == [0] * 3 + [1] * 3 + [3] * 3
    assert 1 <= len(collection.failures) <= 3
    assert len(collection.failures) + collection.num_dropped == 3
    assert sum(told) == 12
    assert engine.poll() == []


def test_failures_beyond_the_share_leave_nothing_under_way(collector, engine):
    playing = collector(fails_at=1, bad_seeds=(102,), max_failure_share=0.0)
    with pytest.raises(RuntimeError, match=r"1 of 12 episodes .*max_failure_share 0.0.*server lost"):
        playing.collect(plans(), BORN)
    assert engine.poll() == []
    assert len(collector().collect(plans(), BORN).trajectories) == 12
