"""A whole run in miniature: the objects that the command line makes, on a tiny model and an environment with rewards.

An untrained policy never makes a legal move on the lake, so that all its returns are equal and every advantage is 0.
The environment here scores any reply by a hash of its text: returns differ, and there is a gradient from the start.
"""

import zlib
from pathlib import Path

import gymnasium
import torch
from gymnasium.spaces import Text
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms.algorithm import GRPO
from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.freshness import FreshnessCallback
from freshper_lightning.callbacks.progress import LoopProgress
from freshper_lightning.callbacks.replay_monitor import ReplayMonitor
from freshper_lightning.callbacks.report import Report
from freshper_lightning.callbacks.rollout import RolloutCallback
from freshper_lightning.checkpoint import ReplayCheckpointIO
from freshper_lightning.envs.protocol import ReplySpace
from freshper_lightning.policy.module import PolicyModule
from freshper_lightning.policy.tiny import TinySpec, build_tiny, byte_tokenizer
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.factory import EngineConfig
from freshper_lightning.rollout.sampling import SamplingConfig

SPEC = TinySpec(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate=128, max_position=256)


class HashScore(gymnasium.Env):
    """Up to three turns; the hash of seed, turn and reply says what a reply is worth, and whether it ends the game.

    ``levels`` is the number of distinct rewards; one level makes them all 0. Of every ``fails_every`` instances one
    raises.
    """

    observation_space = Text(64)
    action_space = ReplySpace()

    def __init__(self, levels=5, fails_every=None):
        self.levels, self.fails_every = levels, fails_every

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed_of_instance, self.turn = seed, 0
        return f"Say {seed % 97}", {}

    def step(self, action):
        if self.fails_every is not None and self.seed_of_instance // 2 % self.fails_every == 0:
            raise OSError("the server of this instance is down")
        score = zlib.crc32(f"{self.seed_of_instance} {self.turn} {action}".encode())
        self.turn += 1
        reward = (score % self.levels) / max(self.levels - 1, 1)
        info = {"valid": score % 7 > 1, "success": reward > 0.5}
        return f"Got {reward}", reward, score % 3 == 0, self.turn == 3, info


if "tests/HashScore-v0" not in gymnasium.registry:
    gymnasium.register("tests/HashScore-v0", entry_point=HashScore)


def tiny_model(path: Path) -> Path:
    build_tiny(path, SPEC, byte_tokenizer())
    return path


def rollout_callback(**fields) -> RolloutCallback:
    engine = EngineConfig(name=fields.pop("engine", "transformers"), max_model_len=160, kv_cache_mib=16)
    defaults = {
        "environment": EnvironmentConfig("tests/HashScore-v0"),
        "engine": engine,
        "sampling": SamplingConfig(max_tokens=6),
        "groups": 2,
        "group_size": 4,
        "format_penalty": -0.25,
        "seed": 3,
    }
    return RolloutCallback(**(defaults | fields))


def replay_data(**fields) -> ReplayDataModule:
    return ReplayDataModule(
        **({"batch_size": 4, "replay_updates": 2, "beta": 0.4, "beta_end": 1.0, "beta_updates": 20, "seed": 3} | fields)
    )


def policy(path, lr=1e-2, algorithm=None, optimizer=torch.optim.AdamW, **fields) -> PolicyModule:
    def make(parameters):
        return optimizer(parameters, lr=lr, weight_decay=0.0)

    return PolicyModule(str(path), algorithm or GRPO(), optimizer=make, **fields)


def trainer(
    folder: Path,
    iterations=2,
    rollout: RolloutCallback | None = None,
    evaluation: EvaluationCallback | None = None,
    freshness: FreshnessCallback | None = None,
    extra: tuple[Callback, ...] = (),
    checkpoint: ModelCheckpoint | None = None,
    progress: LoopProgress | None = None,
    **fields,
) -> Trainer:
    """In the order of the command line: callbacks of every run, then those of the configuration."""
    callbacks = [
        rollout or rollout_callback(),
        freshness or FreshnessCallback(),
        ReplayMonitor(),
        evaluation or EvaluationCallback(episodes=2, at_start=False),
        progress or LoopProgress(),
        Report(enabled=False),
        *extra,
    ]
    if fields.get("enable_checkpointing", True):
        callbacks.append(checkpoint or ModelCheckpoint(save_last=True, every_n_epochs=1_000_000))
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": iterations,
        "logger": TensorBoardLogger(folder, name="run", version=""),
        "plugins": [ReplayCheckpointIO()],
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "gradient_clip_val": 1.0,
    }
    return Trainer(callbacks=callbacks, **(defaults | fields))


class Recorder(Callback):
    """Keeps, for each micro-batch, what was trained on and what was seen; placed after the loop's own callbacks."""

    def __init__(self):
        self.batches, self.observations, self.norms, self.clocks, self.draws = [], [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)
        data = trainer.datamodule
        draw = getattr(data, "last_draw", None) if batch.phase == "replay" else None
        self.draws.append(draw)
        self.clocks.append(trainer.callbacks[0].clock)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.observations.append(outputs["observation"])
        self.norms.append(None if pl_module.gradient_norm is None else float(pl_module.gradient_norm))

    def metric(self, name):
        """One tensor per micro-batch that holds a trajectory."""
        pairs = zip(self.batches, self.observations, strict=True)
        return [seen.token_metrics[name] for batch, seen in pairs if not batch.is_filler]


def fit(folder: Path, module: PolicyModule, data: ReplayDataModule, ckpt_path=None, **fields) -> Trainer:
    run = trainer(folder, **fields)
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return run
