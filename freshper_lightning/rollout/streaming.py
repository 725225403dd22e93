"""Plays episodes each at its own pace, so that a slow environment does not hold the engine idle."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from freshper_lightning.rollout.collector import Run, TooManyFailuresError
from freshper_lightning.rollout.episode import Opening, Outcome, reset


def stream(run: Run, threads: int) -> None:
    """Play all episodes of ``run`` to their ends; up to ``threads`` environments are busy at the same time.

    Engine and conversations stay in the calling thread.

    Raises:
        TooManyFailuresError: More episodes were lost than may be; nothing is under way in the engine then.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="environment") as pool:
        streaming = _Streaming(run, pool)
        try:
            streaming.play()
        except TooManyFailuresError:
            pool.shutdown(wait=False, cancel_futures=True)
            streaming.drain()
            raise


class _Streaming:
    """Which episodes of a run are with their environment and which with the engine; all others are at their end."""

    def __init__(self, run: Run, pool: ThreadPoolExecutor) -> None:
        self.run, self.pool = run, pool
        self.engine = run.collector.engine
        self.with_environment: dict[Future[Opening | Outcome], int] = {}
        self.with_engine: set[int] = set()

    def play(self) -> None:
        for slot, plan in enumerate(self.run.plans):
            self.with_environment[self.pool.submit(reset, self.run.collector.env(slot), plan)] = slot
        while self.with_environment or self.with_engine:
            if self.with_engine:
                self._generate()
            else:
                wait(self.with_environment, return_when=FIRST_COMPLETED)
            for future in [future for future in self.with_environment if future.done()]:
                self._hear(future, self.with_environment.pop(future))
            self.run.report_ended()

    def drain(self) -> None:
        """Let the engine finish what is under way and forget it."""
        while self.engine.poll():
            pass

    def _generate(self) -> None:
        """One step of the engine, or several where no environment could ask for anything meanwhile."""
        began = time.perf_counter()
        completions = self.engine.poll(wait=not self.with_environment)
        self.run.collection.seconds_generating += time.perf_counter() - began
        for completion in completions:
            slot = completion.request_id
            self.with_engine.remove(slot)
            reply = self.run.take(slot, completion)
            if self.run.runs(slot):
                self.with_environment[self.pool.submit(self.run.episodes[slot].play, reply)] = slot

    def _hear(self, future: Future[Opening | Outcome], slot: int) -> None:
        """Go on where the environment has answered, and ask for the next reply."""
        with self.run.lost_to_an_error(slot):
            answer = future.result()
            if isinstance(answer, Opening):
                self.run.begin(slot, answer)
            else:
                self.run.settle(slot, answer)
        if self.run.runs(slot):
            self.engine.submit(self.run.request(slot))
            self.with_engine.add(slot)
