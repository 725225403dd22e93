"""One run of TRL's GRPOTrainer: `python -m benchmarks.trainer.trl_peer JOB OUTCOME`, in the environment that has it.

Settings are TRL's own but for what has to be the same on both sides, which :func:`settings` lists.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.machine import versions
from benchmarks.trainer.task import (
    CLIP_NORM,
    LEARNING_RATE,
    Job,
    Measured,
    Outcome,
    Ragged,
    read_job,
    resident_mib,
    reward,
    write,
)

PACKAGES = ("torch", "transformers", "trl", "accelerate")


class Timed(GRPOTrainer):
    """The trainer, which notes how long each generation takes and how many tokens it has; all else is TRL's."""

    generation: list[float]
    tokens: list[tuple[int, int]]

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        generated = super()._generate(prompts)
        self.generation.append(time.perf_counter() - began)
        prompt_ids, completion_ids = generated[:2]
        self.tokens.append((sum(map(len, prompt_ids)), sum(map(len, completion_ids))))
        return generated


class Watch(TrainerCallback):
    """Times each iteration from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def on_train_begin(self, *arguments: Any, **others: Any) -> None:
        """The first iteration begins."""
        self._since = time.perf_counter()

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        """One iteration ends and the next begins."""
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now


def settings(job: Job, folder: Path) -> GRPOConfig:
    """What is not TRL's default. Without it bf16 and gradient checkpointing would be on and prompts shuffled."""
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=job.precision == "bfloat16",
        gradient_checkpointing=job.checkpointing,
        per_device_train_batch_size=job.groups * job.group_size // job.micro_batches,
        gradient_accumulation_steps=job.micro_batches,
        num_generations=job.group_size,
        max_completion_length=job.new_tokens,
        generation_kwargs={"min_new_tokens": job.new_tokens},
        max_steps=job.iterations,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job.seed,
    )


def run(job: Job, folder: Path) -> Outcome:
    """Train as ``job`` says, with files in ``folder``."""
    start, watch = resident_mib(), Watch()
    trainer = Timed(
        model=job.model,
        reward_funcs=score,
        args=settings(job, folder),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in job.prompts]),
        callbacks=[watch],
        rollout_func=None if job.ragged is None else prepared(job.ragged),
    )
    trainer.generation, trainer.tokens = [], []
    trainer.train()
    iterations = [
        Measured(seconds, generated, *tokens)
        for seconds, generated, tokens in zip(watch.seconds, trainer.generation, trainer.tokens, strict=True)
    ]
    return Outcome(iterations, resident_mib("VmHWM"), start, versions(*PACKAGES))


def score(completions: list[Any], **others: Any) -> list[float]:
    """Rewards of a batch."""
    return [reward(completion[0]["content"]) for completion in completions]


def prepared(ragged: Ragged) -> Any:
    """TRL's way to bring completions of one's own: as many as there are prompts, the next ones each time."""
    played = 0

    def rollouts(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        nonlocal played
        batch = slice(played, played + len(prompts))
        played += len(prompts)
        return {
            "prompt_ids": ragged.prompt_ids[batch],
            "completion_ids": ragged.completion_ids[batch],
            "logprobs": ragged.log_probs[batch],
        }

    return rollouts


def main() -> None:
    """Read the job, run it, write the outcome."""
    job, outcome = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        write(run(read_job(job), Path(folder)), outcome)


if __name__ == "__main__":
    main()
