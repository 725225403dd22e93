"""Two iterations on the number of ranks that is asked for; each rank leaves a file of what it saw.

Usage: python -m tests.sharded_run MODEL FOLDER RANKS DRAW LOST, where rank LOST, if there is one, gets no trajectories.
"""

import sys
from pathlib import Path

import torch
from lightning import Callback
from torch.distributed.tensor import DTensor

from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms import GRPO, ESSGuard
from freshper_lightning.algorithms.ess import sequence_log_weights
from freshper_lightning.callbacks.drift import choose_probe
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.replay import AbsoluteAdvantage
from freshper_lightning.strategies import FSDP2Strategy
from tests.loop import fit, policy, rollout_callback


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class LosingData(ReplayDataModule):
    """One of the ranks loses everything that it has collected."""

    def __init__(self, lost, **fields):
        super().__init__(**fields)
        self.lost = lost

    def add_fresh(self, trajectories):
        super().add_fresh([] if self.trainer.global_rank == self.lost else trajectories)


def masses(buffer, clock):
    """``p ** alpha`` of every entry by the formula, by id; moved on by one update, as all entries are."""
    ids, ages = buffer.ids(), torch.from_numpy(buffer.ages(clock))
    bases = torch.tensor([AbsoluteAdvantage().base(item) for item in buffer.get(ids)], dtype=torch.float64)
    return dict(zip(ids.tolist(), ((bases * torch.exp(-ages / 50)) ** 0.6).tolist(), strict=True))


def in_order(draw, batches):
    """Probabilities of a draw in the order of its micro-batches."""
    of = dict(zip(draw.ids.tolist(), draw.probabilities.tolist(), strict=True))
    ids = [key for batch in batches for key in batch.ids.tolist()]
    return torch.tensor([of[key] for key in ids], dtype=torch.float64)


class Diary(Callback):
    """One row per optimizer batch: what this rank was given, and the whole policy afterwards."""

    def __init__(self):
        self.rows, self.sharded, self.batches, self.log_weights = [], False, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        if not batch.is_filler:
            log_ratio = outputs["observation"].token_metrics["log_ratio"]
            self.log_weights.append(sequence_log_weights(log_ratio, batch.segments, len(batch.ids)))
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        batches, self.batches = self.batches, []
        log_weights, self.log_weights = torch.cat([torch.empty(0, dtype=torch.float64), *self.log_weights]), []
        draw = trainer.datamodule.last_draw if batch.phase == "replay" else None
        self.sharded = all(isinstance(p, DTensor) for p in pl_module.policy.parameters())
        self.rows.append(
            {
                "phase": batch.phase,
                "shares": any(b.spans is not None for b in batches),
                "ids": torch.cat([b.ids for b in batches]),
                "weights": torch.cat([b.importance_weights for b in batches if not b.is_filler] or [torch.empty(0)]),
                "probabilities": None if draw is None else in_order(draw, batches),
                "masses": masses(trainer.datamodule.buffer, trainer.callbacks[0].clock),
                "tokens": float(sum(b.lengths.sum() for b in batches if not b.is_filler)),
                "effective": trainer.datamodule.effective_draw,
                "beta": trainer.datamodule.current_beta(),
                "totals": (batch.total_tokens, batch.total_sequences),
                "loss": outputs["observation"].loss,
                "log_weights": log_weights,
                "factor": pl_module.guard_factor,
                "norm": pl_module.gradient_norm.clone(),
                "drift": trainer.callbacks[0].clock.drift,
                "probe": [(t.token_ids, t.turns) for t in choose_probe(trainer.datamodule.fresh(), 1, seed=3)],
                "parameters": [full(parameter) for parameter in pl_module.policy.parameters()],
            }
        )


def run(model, folder, ranks, draw="stratified", lost=None):
    algorithm = GRPO(kl_coefficient=0.01, kl_in="reward", kl_estimator="k1")
    guard = ESSGuard(ess_sequence=1.0)
    diary, module = Diary(), policy(model, lr=0.1, optimizer=torch.optim.SGD, algorithm=algorithm, guard=guard)
    options = {"strategy": FSDP2Strategy(), "devices": ranks} if ranks > 1 else {}
    settings = {"batch_size": 8, "minimum_size": 4, "replay_updates": 2, "seed": 3}
    settings |= {"beta": 0.4, "beta_end": 1.0, "beta_updates": 20}
    data = LosingData(lost, draw=draw, **settings)
    options |= {"rollout": rollout_callback(measure_drift=True), "accumulate_grad_batches": 2}
    trainer = fit(folder, module, data, extra=(diary,), enable_checkpointing=False, **options)
    group = {
        "rows": diary.rows,
        "sharded": diary.sharded,
        "groups": [t.group for t in data.buffer.get(data.buffer.ids())],
    }
    group |= {"updates": trainer.callbacks[0].clock.updates, "steps": trainer.callbacks[0].environment_steps}
    buffer = data.buffer
    counts = (len(buffer), buffer.nbytes, buffer.evicted(), len(buffer.pinned()))
    group["held"] = dict(zip(("size", "bytes", "evicted", "pinned"), map(float, counts), strict=True))
    group["held"]["age_buffer"] = float(buffer.ages(trainer.callbacks[0].clock).sum())
    if trainer.is_global_zero:
        scalars = read_scalars(trainer.logger.log_dir)
        group["logged"] = {name: scalars[f"replay/{name}"] for name in group["held"]}
    torch.save(group, folder / f"rank{trainer.global_rank}_of_{ranks}.pt")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
