"""Writers, readers, an updater and the decay thread at once, with threads that are switched all the time."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from freshper_lightning.replay import ExponentialDecay, InverseDecay
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_buffer, make_trajectory, of_rewards

CAPACITY = 300


class Crowd:
    """Every trajectory says in all of its parts which one it is, so that a mixture of two would be seen."""

    def __init__(self, decay, eviction):
        parameters = {"capacity": CAPACITY, "decay": decay, "alpha": 0.6, "eviction": eviction}
        self.buffer, self.twin = make_buffer(**parameters), make_buffer(**parameters)
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

    def count(self):
        for buffer in (self.buffer, self.twin):
            assert 0 <= buffer.image_nbytes <= buffer.nbytes
            assert buffer.allocated > 0
            assert buffer.evicted() >= 0
            assert buffer.draws() >= 0

    def restart(self):
        self.twin.load_state_dict(self.buffer.state_dict())
        self.twin.get(self.twin.ids()[:5])
        self.buffer.close()

    def repeat(self, action):
        try:
            while not self.stop.is_set():
                action()
                self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
        except BaseException as failure:
            self.failures.append(failure)
            self.stop.set()


def crowd_for(seconds, decay, eviction):
    crowd = Crowd(decay, eviction)
    crowd.write()
    actions = [crowd.write, crowd.write, crowd.read, crowd.read, crowd.look, crowd.update, crowd.prefetch]
    actions += [crowd.count, crowd.restart]
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


def check_after(crowd, eviction):
    """Nothing is lost, and what was kept up to date piece by piece is what one gets from scratch."""
    if crowd.failures:
        raise crowd.failures[0]
    assert len(crowd.counts) == 7
    buffer = crowd.buffer
    kept = sorted(crowd.given)[-CAPACITY:] if eviction == "fifo" else buffer.ids().tolist()
    assert buffer.ids().tolist() == kept
    assert len(kept) == min(CAPACITY, len(crowd.given)) == len(crowd.given) - buffer.evicted()
    for key, item in zip(kept, buffer.get(kept), strict=True):
        assert item.group == crowd.given[key]
    now = ClockReading(updates=10**6)
    odds = buffer.probabilities(now)
    again = make_buffer(capacity=CAPACITY, decay=buffer.decay, alpha=0.6)
    again.load_state_dict(buffer.state_dict())
    assert again.probabilities(now).tobytes() == odds.tobytes()
    buffer.close()


@pytest.mark.parametrize(("decay", "eviction"), [(ExponentialDecay(tau=1e6), "fifo"), (InverseDecay(), "lowest")])
def test_no_read_is_torn_and_nothing_is_lost(decay, eviction):
    check_after(crowd_for(1.5, decay, eviction), eviction)


def test_sizes_can_be_asked_for_while_large_blocks_come_and_go():
    items = [make_trajectory((1.0,), turn_tokens=(4000,), images=(bytes([k]) * 5000,)) for k in range(20)]
    buffer, stop, failures = make_buffer(capacity=100), threading.Event(), []

    def repeat(action):
        try:
            while not stop.is_set():
                action()
        except Exception as failure:
            failures.append(failure)

    def ask():
        assert buffer.image_nbytes <= buffer.nbytes
        assert buffer.allocated >= 0
        assert buffer.evicted() >= 0

    actions = [lambda: buffer.add(items, ClockReading()), ask, ask]
    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        stop.wait(1.5)
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def fork_and(use):
    """Exit status of a child that uses a buffer."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            use()
        except RuntimeError as error:
            os._exit(3 if "when the process was forked" in str(error) else 4)
        except BaseException:
            os._exit(5)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_a_child_forked_during_a_call_of_another_thread_is_told_so_and_never_waits(inside):
    buffer, other = make_buffer(), make_buffer()
    for one in (buffer, other):
        one.add(of_rewards(1, 2, 3), ClockReading())
    entered, go = threading.Event(), threading.Event()

    def gather(row):
        entered.set()
        go.wait()
        return row[None]

    thread = threading.Thread(target=lambda: buffer.sample(2, ClockReading(), 0.4, gather))
    thread.start()
    entered.wait()
    if not inside:
        go.set()
        thread.join()
    try:
        assert fork_and(lambda: buffer.sample(2, ClockReading(), 0.4)) == (3 if inside else 0)
        assert fork_and(lambda: other.sample(2, ClockReading(), 0.4)) == 0
    finally:
        go.set()
        thread.join()
    assert buffer.sample(2, ClockReading(), 0.4).ids.size == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_inside_a_call_goes_on_in_the_child():
    buffer, status = make_buffer(), []
    buffer.add(of_rewards(1, 2, 3), ClockReading())

    def gather(row):
        status.append(fork_and(lambda: (buffer.sample(2, ClockReading(), 0.4), buffer.ids())))
        return row[None]

    buffer.sample(2, ClockReading(), 0.4, gather)
    assert status == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "eviction"), [(ExponentialDecay(tau=1e6), "fifo"), (InverseDecay(), "lowest")])
def test_no_read_is_torn_and_nothing_is_lost_in_half_a_minute(decay, eviction):
    started = time.monotonic()
    check_after(crowd_for(30, decay, eviction), eviction)
    assert time.monotonic() - started >= 30
