"""Writers, readers, an updater and the decay thread at once, with threads that are switched all the time."""

import sys
import threading
import time

import numpy as np
import pytest

from freshper_lightning.replay import ExponentialDecay, InverseDecay
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_buffer, make_trajectory

CAPACITY = 300


class Crowd:
    """Every trajectory says in all of its parts which one it is, so that a mixture of two would be seen."""

    def __init__(self, decay):
        self.buffer = make_buffer(capacity=CAPACITY, decay=decay, alpha=0.6, eviction="fifo")
        self.given, self.stop, self.failures, self.counts = {}, threading.Event(), [], {}
        self.mark_lock = threading.Lock()
        self.mark, self.time = 0, 0

    def marked(self):
        with self.mark_lock:
            self.mark += 1
            mark = self.mark
        item = make_trajectory(rewards=(float(mark),), group=mark, member=mark, seed=mark, images=(b"%d" % mark,))
        item.token_ids.fill_(mark)
        return item

    def write(self):
        items = [self.marked() for _ in range(5)]
        for key, item in zip(self.buffer.add(items, ClockReading()), items, strict=True):
            self.given[int(key)] = item.group

    def read(self):
        draw = self.buffer.sample(16, ClockReading(updates=10**6), beta=0.4)
        assert (draw.probabilities > 0).all()
        assert (draw.probabilities <= 1).all()
        assert draw.weights.max() == 1
        for key, item in zip(draw.ids.tolist(), draw.trajectories, strict=True):
            mark = item.group
            assert self.given.get(key, mark) == mark
            assert (item.member, item.seed, item.rewards.tolist()) == (mark, mark, [mark])
            assert set(item.token_ids.tolist()) == {mark}
            assert item.images == (b"%d" % mark,)

    def look(self):
        odds = self.buffer.probabilities(ClockReading(updates=10**6))
        assert odds.sum() == pytest.approx(1, rel=1e-12)
        ids = self.buffer.ids()
        assert len(ids) <= CAPACITY
        assert (np.diff(ids) > 0).all()

    def update(self):
        ids = np.random.default_rng().choice(self.buffer.ids(), 20)
        self.buffer.update_priorities(ids, np.random.default_rng().random(20) + 0.01)
        self.buffer.observe(ids[:3], [-0.1, -0.2, -0.3], ClockReading())

    def prefetch(self):
        self.buffer.prefetch(ClockReading(updates=10**6))

    def repeat(self, action):
        try:
            while not self.stop.is_set():
                action()
                self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
        except BaseException as failure:
            self.failures.append(failure)
            self.stop.set()


def crowd_for(seconds, decay):
    crowd = Crowd(decay)
    crowd.write()
    actions = [crowd.write, crowd.write, crowd.read, crowd.read, crowd.look, crowd.update, crowd.prefetch]
    threads = [threading.Thread(target=crowd.repeat, args=(action,)) for action in actions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        crowd.stop.wait(seconds)
        crowd.stop.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return crowd


def check_after(crowd):
    """Nothing is lost, and what was kept up to date piece by piece is what one gets from scratch."""
    if crowd.failures:
        raise crowd.failures[0]
    assert len(crowd.counts) == 5
    buffer = crowd.buffer
    newest = sorted(crowd.given)[-CAPACITY:]
    assert buffer.ids().tolist() == newest
    for key, item in zip(newest, buffer.get(newest), strict=True):
        assert item.group == crowd.given[key]
    now = ClockReading(updates=10**6)
    kept = buffer.probabilities(now)
    again = make_buffer(capacity=CAPACITY, decay=buffer.decay, alpha=0.6)
    again.load_state_dict(buffer.state_dict())
    assert again.probabilities(now).tobytes() == kept.tobytes()
    buffer.close()


@pytest.mark.parametrize("decay", [ExponentialDecay(tau=1e6), InverseDecay()])
def test_no_read_is_torn_and_nothing_is_lost(decay):
    check_after(crowd_for(1.5, decay))


@pytest.mark.slow
@pytest.mark.parametrize("decay", [ExponentialDecay(tau=1e6), InverseDecay()])
def test_no_read_is_torn_and_nothing_is_lost_in_half_a_minute(decay):
    started = time.monotonic()
    check_after(crowd_for(30, decay))
    assert time.monotonic() - started >= 30
