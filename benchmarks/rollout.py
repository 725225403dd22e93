"""How much of an engine's own speed multi-turn play reaches, in lock-step and streaming.

Every environment plays the same number of turns and takes a random time over each. The engine's own speed is that on
the requests of the same episodes, recorded and queued all at once.

python -m benchmarks.rollout --model runs/quickstart/policy --engine vllm
"""

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
from transformers import AutoModelForCausalLM, AutoTokenizer
from typing_extensions import override

from benchmarks import rows
from benchmarks.machine import same_commit
from benchmarks.pages import put_between, table
from freshper_lightning.envs.frozen_lake import FrozenLake
from freshper_lightning.rollout.collector import Collector, EnvironmentConfig, Play
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.episode import EpisodePlan
from freshper_lightning.rollout.factory import EngineConfig, build_engine
from freshper_lightning.rollout.sampling import SamplingConfig
from freshper_lightning.trajectory import ClockReading

ENVIRONMENTS = 64
BEGIN, END = "<!-- {name}: written by `make bench-rollout` -->", "<!-- end of {name} -->"


@dataclass(frozen=True)
class Row:
    """One way to play; speeds are medians of the repetitions."""

    model: str
    engine: str
    play: str
    seconds_per_step: str
    """Mean time that an environment takes."""
    tokens: int
    """Of the last repetition."""
    tokens_per_second: int
    of_the_engine: float
    """Of the engine's own tokens per second on the same requests, queued all at once."""
    environments: int
    turns: int
    max_tokens: int
    repetitions: int
    threads: str
    machine: str
    commit: str

    @property
    def case(self) -> tuple[str, str, str, str]:
        """What is measured once."""
        return self.model, self.engine, self.play, self.seconds_per_step


class LateLake(FrozenLake):
    """FrozenLake whose player never moves, so that it plays all its turns, and that thinks for a random time."""

    def __init__(self, seconds: float, turns: int) -> None:
        super().__init__(max_turns=turns)
        self.seconds, self.delays = seconds, random.Random(0)

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.delays = random.Random(seed)
        return super().reset(seed=seed, options=options)

    @override
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.seconds:
            time.sleep(self.delays.expovariate(1 / self.seconds))
        return super().step("")


gymnasium.register("benchmark/LateLake-v0", LateLake)


class Recorder:
    """An engine that passes everything on and keeps the requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.requests = engine, list[GenerationRequest]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: GenerationRequest) -> None:
        """As of the engine."""
        self.requests.append(request)
        self.engine.submit(request)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """As of the engine."""
        kept = list(requests)
        self.requests += kept
        return self.engine.generate(kept)


def main() -> None:
    """Measure what the command line asks for and add it to the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="vllm")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.1], help="mean time of one step")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--table", type=Path, default=Path("docs/results/rollout.csv"))
    parser.add_argument("--page", type=Path, default=Path("docs/tasks.md"), help="where the table is put")
    options = parser.parse_args()
    rows.require_own_table(options, parser, "turns", "max_tokens")
    config = EngineConfig(options.engine, max_model_len=1024, max_batch_size=ENVIRONMENTS, kv_cache_mib=1024)
    engine = build_engine(config, options.model, seed=0, device="cpu")
    weights = list(AutoModelForCausalLM.from_pretrained(options.model).named_parameters())
    with same_commit() as measured:
        for seconds in options.seconds:
            for line in compare(options, engine, weights, seconds, measured):
                others = [row for row in rows.read(options.table, Row) if row.case != line.case]
                rows.write(options.table, [*others, line])
    engine.close()
    put_between(options.page, {"throughput": page(rows.read(options.table, Row))}, BEGIN, END)


def page(found: Iterable[Row]) -> str:
    """The table in Markdown."""
    columns = ("model", "engine", "seconds per step", "play", "tokens per second", "of the engine's own")
    lines = (
        [
            row.model,
            row.engine,
            row.seconds_per_step,
            row.play,
            f"{row.tokens_per_second:,}",
            f"{row.of_the_engine:.2f}",
        ]
        for row in found
    )
    return table(columns, lines)


def compare(
    options: argparse.Namespace,
    engine: RolloutEngine,
    weights: list[Any],
    seconds: float,
    measured: Callable[[], str],
) -> Iterator[Row]:
    """One row for each way to play, each against the engine on the same requests, as soon as it is measured."""
    ways: tuple[Play, ...] = ("lock_step", "streaming")
    for play in ways:
        shares, speeds, tokens = [], [], 0
        for repetition in range(options.repetitions):
            recorder = Recorder(engine)
            collector = make_collector(options, recorder, play, seconds)
            plans = [EpisodePlan(i, 0, 2 * i, (repetition, i)) for i in range(ENVIRONMENTS)]
            forget(engine, weights)
            start = time.perf_counter()
            tokens = collector.collect(plans, ClockReading()).num_sampled_tokens
            played = time.perf_counter() - start
            collector.close()
            queue = [replace(request, request_id=index) for index, request in enumerate(recorder.requests)]
            forget(engine, weights)
            start = time.perf_counter()
            own = sum(len(completion.token_ids) for completion in engine.generate(queue))
            alone = time.perf_counter() - start
            speeds.append(tokens / played)
            shares.append(tokens / played / (own / alone))
        speed, share = statistics.median(speeds), statistics.median(shares)
        line = row(options, play, seconds, tokens, speed, share, measured())
        print(line, flush=True)
        yield line


def make_collector(options: argparse.Namespace, engine: Any, play: Play, seconds: float) -> Collector:
    """A collector of the late lake over ``engine``."""
    return Collector(
        engine=engine,
        chat=ChatFormat(AutoTokenizer.from_pretrained(options.model)),
        environment=EnvironmentConfig("benchmark/LateLake-v0", {"seconds": seconds, "turns": options.turns}),
        sampling=SamplingConfig(max_tokens=options.max_tokens),
        format_penalty=0.0,
        max_context=1024,
        play=play,
        threads=ENVIRONMENTS,
    )


def forget(engine: RolloutEngine, weights: list[Any]) -> None:
    """Drop what the engine remembers of prompts, as an update of the weights does."""
    engine.load_weights(iter(weights), engine.weight_version + 1)


def row(
    options: argparse.Namespace, play: str, seconds: float, tokens: int, speed: float, share: float, commit: str
) -> Row:
    """One line of the table."""
    return Row(
        model=options.model.name,
        engine=options.engine,
        play=play,
        seconds_per_step=str(seconds),
        tokens=tokens,
        tokens_per_second=round(speed),
        of_the_engine=round(share, 3),
        environments=ENVIRONMENTS,
        turns=options.turns,
        max_tokens=options.max_tokens,
        repetitions=options.repetitions,
        threads=os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
        machine=platform.machine(),
        commit=commit,
    )


if __name__ == "__main__":
    main()
