"""Bounds with a wide margin over what was measured, so that they hold on shared machines and fail for O(N) loops."""

import time

import numpy as np
import pytest

from freshper_lightning.replay import ExponentialDecay, InverseDecay
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_buffer, make_trajectory

N = 50_000


@pytest.fixture(scope="module")
def items():
    return [make_trajectory((1.0 + k,), group=k // 8, member=k % 8) for k in range(128)]


def least(times):
    return 1e3 * min(times)


@pytest.mark.parametrize(("decay", "draw_ms"), [(ExponentialDecay(tau=50), 4.0), (InverseDecay(), 16.0)])
def test_adding_updating_and_drawing_128_of_a_full_buffer_of_50_000_takes_milliseconds(items, decay, draw_ms):
    buffer = make_buffer(capacity=N, decay=decay, alpha=0.6, asynchronous=False)
    for _ in range(N // 128 + 1):
        buffer.add(items, ClockReading())
    rng, times = np.random.default_rng(0), {"add": [], "update": [], "draw": []}
    for step in range(20):
        now, ids, values = ClockReading(updates=step), rng.choice(buffer.ids(), 128), rng.random(128)
        marks = [time.process_time()]
        for action in (
            lambda now=now: buffer.add(items, now),
            lambda ids=ids, values=values: buffer.update_priorities(ids, values),
            lambda now=now: buffer.sample(128, now, beta=0.4),
        ):
            action()
            marks.append(time.process_time())
        for name, spent in zip(times, np.diff(marks), strict=True):
            times[name].append(spent)
    assert least(times["add"]) < 30
    assert least(times["update"]) < 4
    assert least(times["draw"]) < draw_ms


def test_saving_and_loading_50_000_takes_seconds(items):
    buffer, restored = (make_buffer(capacity=N) for _ in range(2))
    for _ in range(N // 128):
        buffer.add(items, ClockReading())
    start = time.process_time()
    state = buffer.state_dict()
    saved = time.process_time()
    restored.load_state_dict(state)
    loaded = time.process_time()
    assert saved - start < 4
    assert loaded - saved < 6
    assert len(restored) == len(buffer)
