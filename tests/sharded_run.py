"""Two iterations on the number of ranks that is asked for; each rank leaves a file of what it saw.

Usage: python -m tests.sharded_run MODEL FOLDER RANKS
"""

import sys
from pathlib import Path

import torch
from lightning import Callback
from torch.distributed.tensor import DTensor

from freshper_lightning.algorithms import GRPO, ESSGuard
from freshper_lightning.algorithms.ess import sequence_log_weights
from freshper_lightning.strategies import FSDP2Strategy
from tests.loop import fit, policy, replay_data


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Diary(Callback):
    """One row per optimizer batch: what this rank was given, and the whole policy afterwards."""

    def __init__(self):
        self.rows, self.sharded, self.batches, self.log_weights = [], False, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        log_ratio = outputs["observation"].token_metrics["log_ratio"]
        self.log_weights.append(sequence_log_weights(log_ratio, batch.segments, len(batch.ids)))
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        batches, self.batches = self.batches, []
        log_weights, self.log_weights = torch.cat(self.log_weights), []
        draw = trainer.datamodule.last_draw if batch.phase == "replay" else None
        self.sharded = any(isinstance(p, DTensor) for p in pl_module.parameters())
        self.rows.append(
            {
                "phase": batch.phase,
                "ids": torch.cat([b.ids for b in batches]),
                "weights": torch.cat([b.importance_weights for b in batches]),
                "probabilities": None if draw is None else torch.from_numpy(draw.probabilities),
                "beta": trainer.datamodule.current_beta(),
                "totals": (batch.total_tokens, batch.total_sequences),
                "loss": outputs["observation"].loss,
                "log_weights": log_weights,
                "factor": pl_module.guard_factor,
                "norm": pl_module.gradient_norm.clone(),
                "parameters": [full(parameter) for parameter in pl_module.policy.parameters()],
            }
        )


def run(model, folder, ranks):
    algorithm = GRPO(kl_coefficient=0.01, kl_in="reward", kl_estimator="k1")
    guard = ESSGuard(ess_sequence=1.0)
    diary, module = Diary(), policy(model, lr=0.1, optimizer=torch.optim.SGD, algorithm=algorithm, guard=guard)
    options = {"strategy": FSDP2Strategy(), "devices": ranks} if ranks > 1 else {}
    data = replay_data(batch_size=8, replay_updates=2)
    trainer = fit(
        folder, module, data, extra=(diary,), accumulate_grad_batches=2, enable_checkpointing=False, **options
    )
    group = {
        "rows": diary.rows,
        "sharded": diary.sharded,
        "groups": [t.group for t in data.buffer.get(data.buffer.ids())],
    }
    group |= {"updates": trainer.callbacks[0].clock.updates, "steps": trainer.callbacks[0].environment_steps}
    torch.save(group, folder / f"rank{trainer.global_rank}_of_{ranks}.pt")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
