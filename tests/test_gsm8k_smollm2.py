"""A real model on real questions, through the command line and vLLM; minutes on a CPU."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from datamodules.replay import ReplayDataModule
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.checkpoint import ReplayCheckpointIO
from freshper_lightning.envs.math import MathQuestion
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import collate
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.trajectory import Trajectory
from tests.questions import write_questions

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[1]
CONFIGS = ("base", "methods/freshper", "gsm8k_smollm2")
TEMPERATURE = 0.8
EPISODES_PER_ITERATION = 16
MAX_GAP = 1e-4


class Run(NamedTuple):
    model: Path
    logs: Path
    output: str

    def checkpoint(self, updates: int) -> dict:
        (path,) = (self.logs / "checkpoints").glob(f"*step={updates}.ckpt")
        return ReplayCheckpointIO().load_checkpoint(path)


def questions(folder: Path, name: str, seeds: range) -> Path:
    """The questions that GSM8K_TRAIN or GSM8K_TEST names, and without these variables arithmetic in their form."""
    given = os.environ.get(f"GSM8K_{name.upper()}")
    return Path(given) if given else write_questions(folder / f"{name}.jsonl", seeds)


def freshper(*arguments: object, **environment: object) -> str:
    """What the command prints; the report of a failure shows it."""
    began = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "freshper_lightning", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **{key: str(value) for key, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{process.stdout}\n{arguments[0]}: {time.perf_counter() - began:.0f} s, at most {peak:.1f} GiB so far")
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.fixture(scope="module")
def run():
    """Two iterations of the configuration; its gigabytes of checkpoints go when the tests are over."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        freshper("smollm2", "--path", folder / "model")
        arguments = [argument for config in CONFIGS for argument in ("-c", f"configs/{config}.yaml")]
        output = freshper(
            *("fit", *arguments, "--model.path", folder / "model", "--trainer.logger.init_args.save_dir", folder),
            *("--checkpoint.save_top_k", -1, "--trainer.logger.init_args.version", ""),
            GSM8K_TRAIN=questions(folder, "train", range(400)),
            GSM8K_TEST=questions(folder, "test", range(400, 600)),
        )
        yield Run(folder / "model", folder / "gsm8k", output)


def trajectories(checkpoint: dict) -> list[Trajectory]:
    data = ReplayDataModule(batch_size=16, capacity=256)
    data.load_state_dict(checkpoint["ReplayDataModule"])
    found = list(data.buffer.get(data.buffer.ids()))
    data.buffer.close()
    return found


@torch.no_grad()
def largest_gap(net: PolicyNet, sampled: list[Trajectory]) -> float:
    """Between the engine's log-probabilities of what it sampled and those of the trainer's network."""
    gaps = []
    for trajectory in sampled:
        batch = collate([trajectory], phase="fresh")
        forward = (batch.input_ids, batch.position_ids, batch.predicted_from, batch.targets, TEMPERATURE)
        gaps.append((net(*forward).log_probs - batch.behavior_log_probs).abs().max())
    return float(torch.stack(gaps).max())


def test_the_converted_model_speaks_and_its_template_keeps_earlier_turns(run):
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    chat = ChatFormat(tokenizer, history="strict")
    prompt = chat.prompt_ids("What is the capital of France?")
    assert "You are a helpful AI assistant named SmolLM" in chat.decode(prompt)
    assert chat.decode(chat.prompt_ids("Hello", system="Be brief."), keep_special=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    model = PolicyNet.from_pretrained(run.model).model.eval()
    reply = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in chat.decode(reply)
    assert reply[-1] == chat.end_token_id == tokenizer.eos_token_id


def test_two_iterations_train_on_fresh_and_on_replayed_data(run):
    scalars = read_scalars(run.logs)
    for phase in ("fresh", "replay"):
        norms = [value for _, value in scalars[f"update/{phase}/gradient_norm"]]
        assert len(norms) == 2
        assert all(0 < norm < float("inf") for norm in norms)
    assert scalars["replay/skipped"] == [(3, 0.0), (6, 0.0)]
    assert scalars["replay/size"] == [(3, EPISODES_PER_ITERATION), (6, 2 * EPISODES_PER_ITERATION)]
    assert scalars["update/fresh/clip_share"] == [(3, 0.0), (6, 0.0)]
    assert all(value == pytest.approx(0, abs=MAX_GAP) for _, value in scalars["update/fresh/log_ratio"])
    assert any(value != 0 for _, value in scalars["update/replay/log_ratio"])


def test_rollouts_evaluation_and_conversation_are_logged(run):
    scalars = read_scalars(run.logs)
    assert [step for step, _ in scalars["rollout/return"]] == [0, 3]
    assert all(0 < value <= 1 for _, value in scalars["rollout/valid_actions"])
    assert [step for step, _ in scalars["evaluation/greedy/return"]] == [6]
    assert all(f"time/{name}" in scalars for name in ("rollout", "sync", "update", "sample"))
    assert "rollouts run on the vllm engine" in run.output
    assert "optimizer steps" in run.output


def test_the_engine_and_the_trainer_agree_on_what_was_sampled_before_and_after_updates(run):
    last = run.checkpoint(updates=6)
    sampled = trajectories(last)
    born = {updates: [t for t in sampled if t.born.updates == updates] for updates in (0, 3)}
    assert [len(of) for of in born.values()] == [EPISODES_PER_ITERATION] * 2
    net = PolicyNet.from_pretrained(run.model)
    before = largest_gap(net, born[0])
    outdated = largest_gap(net, born[3])
    net.load_state_dict({k.removeprefix("net."): v for k, v in run.checkpoint(updates=3)["state_dict"].items()})
    after = largest_gap(net, born[3])
    print(f"largest gap: {before:.2g} before an update, {after:.2g} after three; {outdated:.2g} without a sync")
    assert max(before, after) < MAX_GAP
    assert outdated > 10 * MAX_GAP


def test_the_last_checkpoint_holds_a_trained_model_of_finite_weights(run):
    net = PolicyNet.from_pretrained(run.model)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    state = run.checkpoint(updates=6)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
    assert any(not torch.equal(start[name], value) for name, value in net.state_dict().items())


def test_the_same_questions_come_from_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    file = write_questions(tmp_path / "data" / "train.jsonl", range(20))
    source = {"dataset": str(tmp_path / "data")}
    assert MathQuestion(**source).questions == MathQuestion(path=str(file)).questions
    with pytest.raises(ValueError, match=r"split='test' cannot be loaded"):
        MathQuestion(**source, split="test")
