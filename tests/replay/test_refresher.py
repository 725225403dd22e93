import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from dataclasses import dataclass, field

import numpy as np
import pytest

from freshper_lightning.replay import AbsoluteReward, ExponentialDecay, InverseDecay, ReplayBuffer, WindowDecay
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import make_trajectory

START = ClockReading()


def in_decay_thread():
    return threading.current_thread().name == "replay-decay"


def decay_threads():
    return [thread for thread in threading.enumerate() if thread.name == "replay-decay"]


@dataclass(frozen=True)
class ThreadDecay(InverseDecay):
    """An inverse decay that takes a random while, or fails, in the decay thread only, and notes who evaluates it."""

    delay: float = 0.0
    fails: bool = False
    evaluated_by_thread: list[bool] = field(default_factory=list, compare=False)
    done: threading.Event = field(default_factory=threading.Event, compare=False)

    def log_factor(self, age):
        self.evaluated_by_thread.append(in_decay_thread())
        if in_decay_thread():
            time.sleep(self.delay * np.random.default_rng().random())
            self.done.set()
            if self.fails:
                raise ArithmeticError("no decay today")
        return super().log_factor(age)


def make_buffer(decay, asynchronous=True):
    return ReplayBuffer(150, AbsoluteReward(), decay, seed=7, asynchronous=asynchronous)


def published(buffer):
    return buffer._evaluator._refresher.published


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def train(buffer, iterations=200):
    """A run in small: ids, weights, probabilities and ages of all draws, as bytes."""
    rng, drawn = np.random.default_rng(0), []
    for iteration in range(iterations):
        items = [make_trajectory(rewards=(float(reward),)) for reward in rng.normal(size=4).round(1)]
        buffer.add(items, ClockReading(updates=3 * iteration, iteration=iteration))
        for update in range(3):
            now = ClockReading(updates=3 * iteration + update, iteration=iteration)
            draw = buffer.sample(16, now, beta=0.4)
            drawn.append(
                b"".join(getattr(draw, name).tobytes() for name in ("ids", "weights", "probabilities", "ages"))
            )
            if update == 1:
                buffer.update_priorities(draw.ids, rng.random(16))
            if update == 2 and iteration % 5 == 0:
                buffer.observe(draw.ids[:4], -rng.random(4), now)
            buffer.prefetch(ClockReading(updates=now.updates + 1, iteration=iteration))
    return drawn


@pytest.mark.parametrize("plain", [ExponentialDecay(tau=30), InverseDecay(), WindowDecay(max_age=40)])
def test_draws_are_equal_to_the_bit_with_the_thread_off_and_on(plain):
    with make_buffer(plain, asynchronous=False) as off, make_buffer(plain) as on:
        assert train(off) == train(on)


def test_draws_are_equal_to_the_bit_with_a_thread_that_is_late_at_random():
    late = ThreadDecay(delay=0.004)
    with make_buffer(InverseDecay(), asynchronous=False) as off, make_buffer(late) as delayed:
        assert train(off) == train(delayed)
    assert {True, False} == set(late.evaluated_by_thread)


def test_a_finished_snapshot_is_used_and_nothing_is_evaluated_again():
    decay, now = ThreadDecay(), ClockReading(updates=4)
    with make_buffer(decay) as buffer:
        buffer.add([make_trajectory(), make_trajectory()], START)
        buffer.prefetch(now)
        wait_until(lambda: published(buffer) is not None)
        assert buffer.probabilities(now).any()
        buffer.sample(4, now, beta=0.4)
        assert decay.evaluated_by_thread == [True]


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.add([make_trajectory(rewards=(3.0,))], ClockReading(updates=3)),
        lambda buffer: buffer.update_priorities([0], [5.0]),
        lambda buffer: buffer.observe([0], [-1.0], ClockReading(updates=3)),
        lambda buffer: setattr(buffer, "decay", ExponentialDecay(tau=1)),
        lambda buffer: buffer.load_state_dict(make_buffer(ThreadDecay()).state_dict()),
    ],
)
def test_a_snapshot_of_other_content_or_parameters_is_not_used(change):
    now = ClockReading(updates=4)
    with make_buffer(ThreadDecay()) as buffer, make_buffer(ThreadDecay(), asynchronous=False) as plain:
        for each in (buffer, plain):
            each.add([make_trajectory()], START)
            each.add([make_trajectory(rewards=(2.0,))], ClockReading(updates=3))
        buffer.prefetch(now)
        wait_until(lambda: published(buffer) is not None)
        before = buffer.probabilities(now).tobytes()
        change(buffer)
        change(plain)
        assert buffer.probabilities(now).tobytes() != before
        assert buffer.probabilities(now).tobytes() == plain.probabilities(now).tobytes()


def test_a_snapshot_of_another_moment_is_not_used():
    with make_buffer(ThreadDecay()) as buffer:
        buffer.add([make_trajectory()], START)
        buffer.add([make_trajectory()], ClockReading(updates=3))
        buffer.prefetch(ClockReading(updates=3))
        wait_until(lambda: published(buffer) is not None)
        odds = buffer.probabilities(ClockReading(updates=4))
        assert odds[0] / odds[1] == pytest.approx((2 / 5) ** 0.6, rel=1e-14)


def test_a_result_whose_content_has_changed_meanwhile_is_thrown_away():
    gate, entered = threading.Event(), threading.Event()

    @dataclass(frozen=True)
    class Gated(InverseDecay):
        def log_factor(self, age):
            if in_decay_thread():
                entered.set()
                gate.wait()
            return super().log_factor(age)

    with make_buffer(Gated()) as buffer:
        buffer.add([make_trajectory()], START)
        buffer.prefetch(START)
        assert entered.wait(30)
        buffer.update_priorities([0], [5.0])
        gate.set()
        buffer.prefetch(ClockReading(updates=1))
        wait_until(lambda: published(buffer) is not None)
        assert published(buffer).moment.now == 1


def test_a_decay_that_factorises_needs_no_thread():
    with make_buffer(ExponentialDecay(tau=3)) as buffer:
        before = len(decay_threads())
        buffer.add([make_trajectory()], START)
        buffer.prefetch(START)
        assert len(decay_threads()) == before


def test_a_synchronous_buffer_starts_no_thread():
    before = len(decay_threads())
    with make_buffer(ThreadDecay(), asynchronous=False) as buffer:
        buffer.add([make_trajectory()], START)
        buffer.prefetch(START)
        buffer.sample(1, START, beta=0.4)
        assert len(decay_threads()) == before


def test_prefetch_and_draws_do_not_wait_for_the_thread_which_serves_the_newest_request_only():
    gate, served = threading.Event(), []

    @dataclass(frozen=True)
    class Gated(InverseDecay):
        def log_factor(self, age):
            if in_decay_thread():
                served.append(None)
                gate.wait()
            return super().log_factor(age)

    with make_buffer(Gated()) as buffer:
        buffer.add([make_trajectory()], START)
        for update in range(100):
            buffer.prefetch(ClockReading(updates=update))
        assert buffer.sample(2, ClockReading(updates=99), beta=0.4).ids.tolist() == [0, 0]
        gate.set()
        wait_until(lambda: published(buffer) is not None and published(buffer).moment.now == 99)
        assert len(served) <= 2


@pytest.mark.parametrize(
    "call",
    [
        lambda buffer: buffer.sample(1, START, beta=0.4),
        lambda buffer: buffer.add([make_trajectory()], START),
        lambda buffer: buffer.update_priorities([0], [1.0]),
        lambda buffer: buffer.observe([0], [0.0], START),
        lambda buffer: buffer.prefetch(START),
        lambda buffer: buffer.probabilities(START),
        lambda buffer: buffer.close(),
    ],
)
def test_a_failure_in_the_thread_surfaces_at_the_next_call_with_its_traceback(call):
    buffer = make_buffer(ThreadDecay(fails=True))
    buffer.add([make_trajectory()], START)
    buffer.prefetch(START)
    wait_until(lambda: buffer._evaluator._refresher._mailbox.failure is not None)
    with pytest.raises(RuntimeError, match=r"decay thread .* failed") as caught:
        call(buffer)
    cause = caught.value.__cause__
    assert isinstance(cause, ArithmeticError)
    assert "log_factor" in [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    buffer.close()


def test_closing_ends_the_thread_and_the_buffer_stays_usable():
    before = len(decay_threads())
    buffer = make_buffer(ThreadDecay())
    buffer.add([make_trajectory()], START)
    for _ in range(2):
        buffer.prefetch(START)
        assert len(decay_threads()) == before + 1
        buffer.close()
        buffer.close()
        assert len(decay_threads()) == before
        buffer.sample(1, START, beta=0.4)


def test_a_buffer_that_is_forgotten_takes_its_thread_along():
    before = len(decay_threads())
    buffer = make_buffer(ThreadDecay())
    buffer.add([make_trajectory()], START)
    buffer.prefetch(START)
    del buffer
    gc.collect()
    wait_until(lambda: len(decay_threads()) == before)


def test_the_thread_sleeps_while_there_is_nothing_to_do():
    with make_buffer(ThreadDecay()) as buffer:
        buffer.add([make_trajectory()], START)
        buffer.prefetch(START)
        wait_until(lambda: published(buffer) is not None)
        start = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - start < 0.1


def run_script(body):
    script = "from tests.replay.test_refresher import *\nimport os\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


def test_the_interpreter_exits_cleanly_with_a_busy_thread():
    result = run_script("""
        buffer = make_buffer(ThreadDecay(delay=0.5))
        buffer.add([make_trajectory()], START)
        for update in range(5):
            buffer.prefetch(ClockReading(updates=update))
        print("end of main")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end of main\n", "")


def test_a_forked_child_draws_the_same_without_a_thread():
    result = run_script("""
        import signal
        signal.alarm(60)
        buffer = make_buffer(ThreadDecay(delay=0.05))
        buffer.add([make_trajectory(rewards=(float(k),)) for k in range(9)], START)
        buffer.prefetch(START)
        child = os.fork()
        for update in range(5):
            buffer.prefetch(ClockReading(updates=update))
            draw = buffer.sample(8, ClockReading(updates=update), beta=0.4)
        who = "child" if child == 0 else "parent"
        os.write(1, f"{who} {draw.ids.tolist()} {len(decay_threads())}\\n".encode())
        buffer.close()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
    assert result.returncode == 0, result.stderr
    child, parent = sorted(line.split(" ", 1) for line in result.stdout.splitlines())
    assert (child[0], parent[0]) == ("child", "parent")
    assert child[1].rsplit(" ", 1) == [parent[1].rsplit(" ", 1)[0], "0"]
    assert parent[1].endswith(" 1")


def test_an_exception_of_the_program_ends_it_with_that_exception_and_nothing_else():
    result = run_script("""
        buffer = make_buffer(ThreadDecay(delay=0.5))
        buffer.add([make_trajectory()], START)
        for update in range(5):
            buffer.prefetch(ClockReading(updates=update))
        raise KeyError("the program's own")
    """)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == """KeyError: "the program's own\""""
    assert result.stderr.count("Traceback") == 1


def test_leaving_a_buffer_by_an_exception_ends_its_thread():
    def program():
        with make_buffer(ThreadDecay()) as buffer:
            buffer.add([make_trajectory()], START)
            buffer.prefetch(START)
            raise KeyError("the program's own")

    before = len(decay_threads())
    with pytest.raises(KeyError, match="the program's own"):
        program()
    assert len(decay_threads()) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_after_a_prefetch_goes_on_alike_and_by_itself(copied):
    now, items = ClockReading(updates=4), [make_trajectory(rewards=(float(k),)) for k in range(1, 20)]
    with ReplayBuffer(30, AbsoluteReward(), InverseDecay(), seed=7, weights="sum", draw="gumbel") as buffer:
        buffer.add(items, START)
        buffer.prefetch(now)
        buffer.sample(4, now, beta=0.4)
        with copied(buffer) as other:
            one, same = buffer.sample(4, now, beta=0.4), other.sample(4, now, beta=0.4)
            assert one.ids.tolist() == same.ids.tolist()
            assert one.weights.tobytes() == same.weights.tobytes()
            other.prefetch(now)
            other.add(items, now)
            assert (len(buffer), len(other), other.evicted()) == (19, 30, 8)
