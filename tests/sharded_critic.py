"""One iteration of PPO on the number of ranks that is asked for; each rank leaves a file of what it saw.

Usage: python -m tests.sharded_critic MODEL FOLDER RANKS
"""

import sys
from pathlib import Path

import torch
from lightning import Callback
from torch.distributed.tensor import DTensor

from freshper_lightning.algorithms import PPO
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.replay import TDError
from freshper_lightning.strategies import FSDP2Strategy
from tests.loop import fit, policy, replay_data
from tests.sharded_run import full


class Diary(Callback):
    """One row per micro-batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        row = {"phase": batch.phase, "advantages": batch.advantages, "filler": batch.is_filler}
        row["sharded"] = all(isinstance(p, DTensor) for p in pl_module.parameters())  # the reference, too
        row["norm"] = pl_module.gradient_norm.clone() if pl_module.gradient_norm is not None else None
        row["parameters"] = {name: full(p) for name, p in pl_module.policy.named_parameters()}
        row["engine"] = [name for name, _ in pl_module.policy.checkpoint_tensors()]
        self.rows.append(row)


def run(model, folder, ranks):
    algorithm = PPO(kl_coefficient=0.01, kl_in="reward", kl_estimator="k1")
    module = policy(model, lr=0.1, optimizer=torch.optim.SGD, algorithm=algorithm, critic=CriticSettings())
    diary, options = Diary(), {"strategy": FSDP2Strategy(), "devices": ranks} if ranks > 1 else {}
    data = replay_data(batch_size=8, minimum_size=4, epochs=2, replay_updates=1, priority=TDError())
    settings = {"iterations": 1, "accumulate_grad_batches": 2, "enable_checkpointing": False}
    trainer = fit(folder, module, data, extra=(diary,), **settings, **options)
    seen = {"rows": diary.rows, "bases": torch.from_numpy(data.buffer.bases(data.buffer.ids()))}
    torch.save(seen, folder / f"rank{trainer.global_rank}_of_{ranks}.pt")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
