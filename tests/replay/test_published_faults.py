"""Faults of published replay code, one test each, named after what went wrong there."""

import threading
import time

import numpy as np
import pytest

from freshper_lightning.replay import AbsoluteReward, ExponentialDecay, InverseDecay, NoDecay, ReplayBuffer
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import START, assert_same, assert_same_draw, make_buffer, make_trajectory, of_rewards


def test_fault_f_after_the_buffer_has_wrapped_priorities_and_payloads_belong_together(monkeypatch):
    monkeypatch.setattr("freshper_lightning.replay.columns._MOST_DEAD", 5)
    buffer, items = make_buffer(capacity=7), {}
    for step in range(20):
        new = [make_trajectory(rewards=(1.0,), group=10 * step + k) for k in range(3)]
        items.update(zip(buffer.add(new, START).tolist(), new, strict=True))
        target = int(buffer.ids()[step % len(buffer)])
        buffer.update_priorities(buffer.ids(), np.zeros(len(buffer)))
        buffer.update_priorities([target], [1.0])
        draw = buffer.sample(4, START, beta=0.4)
        assert draw.ids.tolist() == [target] * 4
        assert_same(draw.trajectories[0], items[target])


def test_fault_j_no_floor_and_no_historic_maximum_and_no_negative_age():
    buffer = make_buffer(decay=ExponentialDecay(tau=1.0))
    buffer.add(of_rewards(1e9), START)
    buffer.update_priorities([0], [1.0])
    buffer.add(of_rewards(2, 1), ClockReading(updates=100))
    odds = buffer.probabilities(ClockReading(updates=100))
    assert odds[1] == pytest.approx(2 / 3, rel=1e-12)  # an outlier that is gone does not lift the newcomers
    assert odds[0] == pytest.approx(np.exp(-100) / 3, rel=1e-12)  # and nothing stops an old entry from fading
    with pytest.raises(ValueError, match="now"):
        buffer.observe([1], [0.0], ClockReading(updates=99))


def test_fault_l_weights_are_over_the_maximum_of_the_batch_and_follow_beta():
    buffer = make_buffer(priority=AbsoluteReward(), alpha=0.6)
    buffer.add(of_rewards(*[0.0] * 50, *[1.0] * 50), START)
    draw = buffer.sample(32, START, beta=0.4)
    assert set(draw.ids.tolist()) <= set(range(50, 100))
    assert draw.weights.tolist() == [1.0] * 32  # failures that were not drawn do not shrink the step
    buffer.update_priorities(range(100), range(1, 101))
    spreads = [np.ptp(np.log(buffer.sample(64, START, beta).weights)) for beta in (0.0, 0.4, 1.0)]
    assert spreads[0] == 0
    assert 0 < 2 * spreads[1] < spreads[2]


@pytest.mark.parametrize("draw", ["stratified", "gumbel"])
def test_fault_q_content_and_random_stream_go_on_after_a_restart(draw):
    whole, resumed = (make_buffer(draw=draw, seed=9, decay=InverseDecay()) for _ in range(2))
    whole.add(of_rewards(*range(40)), START)
    first = whole.sample(8, START, beta=0.4)
    resumed.load_state_dict(whole.state_dict())
    one, other = (buffer.sample(8, START, beta=0.4) for buffer in (whole, resumed))
    assert_same_draw(one, other)
    assert first.ids.tolist() != one.ids.tolist()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128])
def test_fault_t_the_last_entry_can_be_drawn_and_counts(count):
    buffer = make_buffer(capacity=200)
    buffer.add(of_rewards(*range(1, count + 1)), START)
    total = count * (count + 1) / 2
    assert buffer.probabilities(START)[-1] == pytest.approx(count / total, rel=1e-12)
    n = int(2 * total / count) + 1
    assert count - 1 in buffer.sample(n, START, beta=0.4).ids


def test_fault_u_every_parameter_changes_something(tmp_path):
    """Each one away from its default gives another result for one and the same use."""

    def use(**parameters):
        buffer = make_buffer(**({"capacity": 40, "decay": InverseDecay(), "alpha": 0.6} | parameters))
        for step in range(12):
            items = of_rewards(*(1.0 + (step * k) % 7 for k in range(5)))
            now = ClockReading(updates=2 * step, iteration=step // 3)
            buffer.add(items, now)
            buffer.prefetch(now)
        draw = buffer.sample(6, now, beta=0.5)
        threads = any(thread.name == "replay-decay" for thread in threading.enumerate())
        mapped = type(buffer._content.store._arena._segments[0].buffer.base).__name__
        buffer.close()
        log_probs = draw.trajectories[0].behavior_log_probs.tolist()
        return [draw.ids.tolist(), draw.probabilities.tolist(), draw.weights.tolist(), log_probs, threads, mapped]

    plain = use()
    assert plain == use()
    for parameters in (
        {"capacity": 30},
        {"priority": AbsoluteReward(eps=1.0)},
        {"decay": NoDecay()},
        {"clock": "iterations"},
        {"alpha": 0.5},
        {"seed": 1},
        {"max_bytes": 6000},
        {"draw": "gumbel"},
        {"eviction": "lowest"},
        {"asynchronous": False},
        {"weights": "sum"},
        {"log_prob_dtype": "float16"},
        {"memory_map": tmp_path},
    ):
        assert use(**parameters) != plain, parameters


@pytest.mark.parametrize("draw", ["newest", "oldest"])
def test_fault_v_newest_and_oldest_are_so_after_places_were_given_again(draw, monkeypatch):
    monkeypatch.setattr("freshper_lightning.replay.columns._MOST_DEAD", 3)
    buffer = make_buffer(capacity=8, draw=draw, eviction="lowest")
    for step in range(15):
        buffer.add(of_rewards(1 + (5 * step) % 7, 1 + (3 * step) % 5, 2), ClockReading(updates=step))
        ids = buffer.ids().tolist()
        if len(ids) >= 4:
            expected = ids[-4:] if draw == "newest" else ids[:4]
            assert buffer.sample(4, ClockReading(updates=step), beta=0.4).ids.tolist() == expected


def test_fault_w_no_two_draws_share_their_random_numbers():
    buffer = make_buffer(capacity=200)
    buffer.add(of_rewards(*range(1, 200)), START)
    batches = [tuple(buffer.sample(16, START, beta=0.4).ids.tolist()) for _ in range(50)]
    assert len(set(batches)) == 50
    other = make_buffer(capacity=200, seed=1)
    other.add(of_rewards(*range(1, 200)), START)
    assert tuple(other.sample(16, START, beta=0.4).ids.tolist()) not in batches


class SlowInThread(InverseDecay):
    def log_factor(self, age):
        if threading.current_thread().name == "replay-decay":
            time.sleep(0.002)
        return super().log_factor(age)


def test_fault_z_writes_during_a_refresh_leave_exact_probabilities():
    with ReplayBuffer(50, AbsoluteReward(eps=0.0), SlowInThread(), alpha=0.6) as racing:
        plain = ReplayBuffer(50, AbsoluteReward(eps=0.0), InverseDecay(), alpha=0.6, asynchronous=False)
        rng = np.random.default_rng(0)
        for step in range(150):
            now = ClockReading(updates=step)
            racing.prefetch(now)
            rewards, ids, values = rng.random(3), rng.integers(0, 3 * step + 3, 5), rng.random(5)
            for buffer in (racing, plain):
                buffer.add(of_rewards(*rewards), now)
                buffer.update_priorities(ids, values)
            assert racing.probabilities(now).tobytes() == plain.probabilities(now).tobytes()
            assert_same_draw(racing.sample(4, now, beta=0.4), plain.sample(4, now, beta=0.4))
