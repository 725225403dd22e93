"""What collectors play in tests, and how they are watched."""

import threading
import time

import gymnasium
from gymnasium.spaces import Text

from freshper_lightning.envs.protocol import ReplySpace
from freshper_lightning.rollout.collector import EpisodePlan
from freshper_lightning.rollout.transformers_engine import TransformersEngine
from freshper_lightning.trajectory import ClockReading

BORN = ClockReading(updates=7, iteration=3)
ECHO, SLOW = "freshper-test/Echo-v0", "freshper-test/Slow-v0"


class Echo(gymnasium.Env):
    """A user's own environment: repeats what it hears; a reply without a letter or digit is invalid."""

    observation_space, action_space = Text(1000), ReplySpace()

    def __init__(self, turns=3, fails_at=None, bad_seeds=(), returns="text"):
        self.turns, self.fails_at, self.bad_seeds, self.returns = turns, fails_at, bad_seeds, returns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.instance, self.turn = seed, 0
        self._maybe_fail()
        return f"instance {seed}", {"system": "Say something."}

    def step(self, action):
        self.turn += 1
        self._maybe_fail()
        valid = any(character.isalnum() for character in action)
        over = self.turn == self.turns
        info = {"valid": valid, "effective": valid and self.turn % 2 == 1, "success": over and valid}
        observation = f"turn {self.turn} of instance {self.instance}"
        return observation if self.returns == "text" else 5, float(self.turn), over, False, info

    def _maybe_fail(self):
        if self.fails_at == self.turn and self.instance in self.bad_seeds:
            raise OSError(f"server lost in turn {self.turn}")


gymnasium.register(ECHO, Echo)


def is_slow(seed):
    """The instance whose environment is slow."""
    return seed == 103


class Slow(Echo):
    """One instance answers only when all ``others`` are done; all note when they are busy and when they are done."""

    busy, most, events, others = 0, 0, [], 0
    lock, others_done = threading.Lock(), threading.Event()

    @classmethod
    def begin(cls, others=0):
        cls.busy, cls.most, cls.events, cls.others = 0, 0, [], others
        cls.others_done.clear()

    def reset(self, *, seed=None, options=None):
        answer = super().reset(seed=seed)
        self._work("reset")
        return answer

    def step(self, action):
        answer = super().step(action)
        self._work("done" if answer[2] else "step")
        return answer

    def _work(self, what):
        with Slow.lock:
            Slow.busy += 1
            Slow.most = max(Slow.most, Slow.busy)
        if is_slow(self.instance):
            assert Slow.others_done.wait(120), "the others wait for the slow one"
        else:
            time.sleep(0.01)
        with Slow.lock:
            Slow.busy -= 1
            Slow.events.append((what, self.instance))
            if [event for event, _ in Slow.events].count("done") == Slow.others:
                Slow.others_done.set()


gymnasium.register(SLOW, Slow)


class RecordingEngine(TransformersEngine):
    """The real engine, which keeps what passed through it: (request, completion) in the order of completions."""

    def submit(self, request):
        super().submit(request)
        self.asked[request.request_id] = request

    def poll(self, wait=True):
        completions = super().poll(wait)
        self.record += [(self.asked[completion.request_id], completion) for completion in completions]
        return completions

    def of(self, slot):
        return [exchange for exchange in self.record if exchange[0].request_id == slot]


def plans(groups=4, size=3, key=0):
    return [EpisodePlan(g, m, 100 + g, (key, 0, g, m)) for g in range(groups) for m in range(size)]
