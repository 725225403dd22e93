"""An engine beside the model that trains it, and what both say about the same tokens."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from freshper_lightning.rollout.engine import Completion, GenerationRequest, RolloutEngine
from freshper_lightning.rollout.factory import EngineConfig, build_engine
from freshper_lightning.rollout.sampling import Truncation

VERSION = 17
STOP = byte_tokenizer().eos_token_id


def request(index, prompt, max_tokens=12, temperature=1.0, seed=None):
    return GenerationRequest(index, prompt, max_tokens, temperature, 1000 + index if seed is None else seed)


def prompts(count=8):
    """The first so many of one list of prompts, 3 to 39 tokens long."""
    generator = np.random.default_rng(5)
    lengths = [3, *generator.integers(3, 40, 199)]
    return [generator.integers(3, 259, length).tolist() for length in lengths[:count]]


def requests(count=8, **fields):
    return [request(index, prompt, **fields) for index, prompt in enumerate(prompts(count))]


def checkpoint(folder: Path, family="llama", tied=True) -> Path:
    build_tiny(folder, TinySpec(family, layers=2, tied=tied), byte_tokenizer())
    return folder


def engine_for(kind, path, truncation: Truncation | None = None, **fields) -> RolloutEngine:
    config = EngineConfig(name=kind, max_model_len=256, max_batch_size=16, kv_cache_mib=32, **fields)
    return build_engine(config, path, seed=0, device="cpu", truncation=truncation)


@dataclass
class Rig:
    engine: RolloutEngine
    trainer: torch.nn.Module
    fingerprints: tuple[float, float]

    def logits(self, prompt, reply):
        with torch.no_grad():
            return self.trainer(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]

    def gap(self, sent: list[GenerationRequest], received: list[Completion]) -> float:
        """Largest difference between the engine's log-probabilities and the trainer's."""
        worst = 0.0
        for question, answer in zip(sent, received, strict=True):
            logits = self.logits(question.prompt_token_ids, answer.token_ids) / question.temperature
            own = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            worst = max(worst, float((own - torch.tensor(answer.log_probs)).abs().max()))
        return worst

    def greedy(self, question: GenerationRequest) -> tuple[int, ...]:
        reply: list[int] = []
        while len(reply) < question.max_tokens and STOP not in reply:
            reply.append(int(self.logits(question.prompt_token_ids, [*reply, 0])[-1].argmax()))
        return tuple(reply)


def trained_rig(kind, path, **fields) -> Rig:
    """A rig whose engine got its weights from the trainer, after it had filled its caches with older ones."""
    engine = engine_for(kind, path, **fields)
    trainer = AutoModelForCausalLM.from_pretrained(path)
    before = engine.weight_fingerprint()
    engine.generate(requests())
    train(trainer)
    engine.load_weights(trainer.named_parameters(), VERSION)
    return Rig(engine, trainer.eval(), (before, engine.weight_fingerprint()))


def train(trainer, steps=2):
    """AdamW on random tokens, with a step size that moves the output head far."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(0, 259, (4, 24), generator=generator)
        trainer(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
