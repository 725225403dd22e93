"""Gradient checkpointing that is really on, in the loop and in what is kept for the backward pass."""

import pytest
import torch
from lightning import Callback

from freshper_lightning.policy.net import PolicyNet
from tests.loop import fit, policy, replay_data
from tests.policy.transcripts import packed, statistics, transcript


class LayerCalls(Callback):
    """How often the inside of the first decoder layer runs for each micro-batch."""

    def __init__(self):
        self.counts, self.handle = [], None

    def _count(self, *_):
        self.counts[-1] += 1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.counts.append(0)
        self.handle = pl_module.policy.blocks()[0].mlp.register_forward_pre_hook(self._count)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.handle.remove()


@pytest.mark.parametrize(("on", "calls"), [(False, 1), (True, 2)])
def test_each_layer_runs_again_in_the_backward_pass_of_each_micro_batch(tmp_path, model_path, on, calls):
    seen = LayerCalls()
    module = policy(model_path, gradient_checkpointing=on)
    fit(tmp_path, module, replay_data(), extra=(seen,), iterations=1, accumulate_grad_batches=2)
    assert seen.counts == [calls] * len(seen.counts)


def kept_elements(net):
    """Elements of all tensors that autograd keeps from a forward pass, weights apart."""
    kept = {}
    weights = {parameter.data_ptr() for parameter in net.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        statistics(net, packed([transcript(200, seed, turns=[(190, 200)]) for seed in range(4)]), with_entropy=False)
    return sum(tensor.numel() for tensor in kept.values())


def test_little_is_kept_from_the_forward_pass(model_path):
    net = PolicyNet.from_pretrained(model_path)
    without = kept_elements(net)
    net.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert kept_elements(net) < 0.25 * without
