"""Three iterations on two ranks with probes, adaptive tau and measured freshness; each rank leaves what it knows.

Usage: python -m tests.sharded_freshness MODEL FOLDER
"""

import sys
from pathlib import Path

import torch
from lightning import Callback
from torch.distributed.tensor import DTensor

from freshper_lightning.callbacks.freshness import FreshnessCallback, ProbeConfig
from freshper_lightning.replay import ExponentialDecay
from freshper_lightning.strategies import FSDP2Strategy
from tests.loop import fit, policy, replay_data

RANKS = 2


class AfterProbes(Callback):
    """Whether the weights are sharded again."""

    def __init__(self):
        self.sharded = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.sharded.append(all(isinstance(p, DTensor) for p in pl_module.policy.parameters()))


def run(model, folder):
    freshness = FreshnessCallback(probe=ProbeConfig(held_out=4, batch_size=8), adapt=True, measured=True)
    data = replay_data(batch_size=4, replay_updates=1, decay=ExponentialDecay(5.0))
    after, strategy = AfterProbes(), {"strategy": FSDP2Strategy(), "devices": RANKS, "enable_checkpointing": False}
    trainer = fit(folder, policy(model), data, iterations=3, freshness=freshness, extra=(after,), **strategy)
    held_out, _ = freshness.held_out.probe(99, trainer.callbacks[0].clock)
    seen = {
        "observed": freshness.estimator.state_dict(),
        "sharded": after.sharded,
        "tau": data.buffer.decay.tau,
        "held_out": [item.group for item in held_out],
        "log_fresh": data.buffer.state_dict()["columns"]["log_fresh"],
    }
    torch.save(seen, folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
