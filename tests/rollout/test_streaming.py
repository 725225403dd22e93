import time

import gymnasium
import pytest
import torch

from tests.rollout.playing import BORN, Echo, plans

pytestmark = pytest.mark.parametrize("play", ["streaming"], indirect=True)


def sleeps(seed):
    """The instance whose environment is slow."""
    return seed == 103


class Slow(Echo):
    """One instance takes its time; all note when they are busy and when they are done."""

    busy, most, events = 0, 0, []

    def reset(self, *, seed=None, options=None):
        answer = super().reset(seed=seed)
        self._work("reset")
        return answer

    def step(self, action):
        answer = super().step(action)
        self._work("done" if answer[2] else "step")
        return answer

    def _work(self, what):
        Slow.busy += 1
        Slow.most = max(Slow.most, Slow.busy)
        time.sleep(1.0 if sleeps(self.instance) else 0.01)
        Slow.busy -= 1
        Slow.events.append((what, self.instance))


gymnasium.register("freshper-test/Slow-v0", Slow)


def test_a_slow_environment_holds_up_nothing_but_itself(collector):
    Slow.busy, Slow.most, Slow.events = 0, 0, []
    trajectories = collector("freshper-test/Slow-v0").collect(plans(size=1), BORN).trajectories
    assert [t.seed for t in trajectories] == [100, 101, 102, 103]
    slow = [event for event in Slow.events if sleeps(event[1])]
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
