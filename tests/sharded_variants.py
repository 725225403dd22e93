"""One iteration with a variant of the policy on the number of ranks that is asked for; each rank leaves what it saw.

A rank that was refused leaves the reason.

Usage: python -m tests.sharded_variants MODEL FOLDER RANKS VARIANT...
"""

import sys
from pathlib import Path

import torch
from lightning import Callback, seed_everything

from datamodules.optimizer_batch import Part
from datamodules.replay import ReplayDataModule
from freshper_lightning.algorithms import GRPO, DecoupledGRPO
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.lora import LoraSettings, is_adapter, whole
from freshper_lightning.strategies import FSDP2Strategy
from tests.loop import fit, policy, rollout_callback


class HalvesOfGroups(ReplayDataModule):
    """A fresh batch has two members of every group, whichever rank has the group; one rank may lose its own."""

    def __init__(self, lost=None, **fields):
        super().__init__(**fields)
        self.lost = lost

    def add_fresh(self, trajectories):
        super().add_fresh([] if self.trainer.global_rank == self.lost else trajectories)

    def _fresh_part(self, update):
        ids = self._fresh.reshape(-1, 2, 2)[:, update % 2].ravel()
        return Part.fresh(ids, self.buffer.get(ids), self._ages(ids))


LORA = {"algorithm": GRPO(kl_coefficient=0.5), "lora": LoraSettings(r=4), "gradient_checkpointing": True}
WHOLE = {"batch_size": 8, "replay_updates": 0, "epochs": 2, "seed": 3}
HALVES = {"batch_size": 4, "replay_updates": 2, "epochs": 2, "minimum_size": 4, "seed": 3}
DECOUPLED = {"algorithm": DecoupledGRPO()}
VARIANTS = {
    "lora": (LORA, {}, lambda: ReplayDataModule(**WHOLE)),
    "bf16": ({}, {"precision": "bf16-mixed"}, lambda: ReplayDataModule(**WHOLE)),
    "plain": ({}, {}, lambda: ReplayDataModule(**WHOLE)),
    "decoupled": (DECOUPLED, {"accumulate_grad_batches": 2}, lambda: HalvesOfGroups(**HALVES)),
    "lost": (DECOUPLED, {"accumulate_grad_batches": 2}, lambda: HalvesOfGroups(lost=1, **HALVES)),
    "crowded": (
        {"max_micro_batch_tokens": 160},
        {"rollout": rollout_callback(seed=5, groups=4)},
        lambda: HalvesOfGroups(lost=1, **HALVES | {"batch_size": 16, "minimum_size": 17}),
    ),
}


class Diary(Callback):
    """Where adapters start, gradient norms of updates, and tokens and metrics of micro-batches."""

    def __init__(self):
        self.start, self.tokens, self.norms, self.metrics = {}, [], [], []

    def on_train_start(self, trainer, pl_module):
        named = pl_module.policy.named_parameters()
        self.start = {name: whole(value).clone() for name, value in named if is_adapter(name)}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.tokens += [tokens.tolist() for tokens in batch.targets.split(batch.lengths.tolist())]
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.norms.append(float(pl_module.gradient_norm))
        metrics = outputs["observation"].token_metrics
        self.metrics.append({name: values.clone() for name, values in metrics.items()})


def run(name, model, folder, ranks):
    fields, options, make_data = VARIANTS[name]
    diary, module = Diary(), policy(model, lr=0.1, optimizer=torch.optim.SGD, **fields)
    if ranks > 1:
        options = options | {"strategy": FSDP2Strategy(), "devices": ranks}
    seed_everything(0, verbose=False)
    options = {"rollout": rollout_callback(seed=5)} | options
    options |= {"iterations": 1, "extra": (diary,), "enable_checkpointing": False}
    try:
        trainer = fit(folder / name, module, make_data(), **options)
    except ConfigurationError as error:
        (folder / f"{name}_rank{module.global_rank}_of_{ranks}.txt").write_text(str(error))
        return
    seen = {"norms": diary.norms, "metrics": diary.metrics, "merged": dict(module.policy.checkpoint_tensors())}
    seen |= {"start": diary.start, "tokens": diary.tokens}
    seen["parameters"] = {name: whole(parameter).clone() for name, parameter in module.policy.named_parameters()}
    seen["dtypes"] = sorted({str(parameter.dtype) for parameter in module.parameters()})
    torch.save(seen, folder / f"{name}_rank{trainer.global_rank}_of_{ranks}.pt")


if __name__ == "__main__":
    for variant in sys.argv[4:]:
        run(variant, sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
