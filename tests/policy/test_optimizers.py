"""AdamW with its state in 8 bits, and learning rates that are tensors."""

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from lightning.pytorch.callbacks import ModelCheckpoint

from freshper_lightning.callbacks.checks import _check_optimizer
from freshper_lightning.errors import ConfigurationError
from tests.loop import Recorder, fit, policy, replay_data


def trained(folder, path, optimizer, lr=1e-3, **options):
    recorder, module = Recorder(), policy(path, lr=lr, optimizer=optimizer)
    trainer = fit(folder, module, replay_data(), extra=(recorder,), **options)
    return trainer, module, recorder


def kept(folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)


def test_states_are_8_bit_and_training_is_close_to_that_of_adamw(tmp_path, model_path):
    trainer, module, recorder = trained(tmp_path / "8", model_path, AdamW8bit)
    for parameter in module.parameters():
        state = trainer.optimizers[0].state[parameter]
        expected = torch.uint8 if parameter.numel() >= 4096 else torch.float32
        assert {state["state1"].dtype, state["state2"].dtype} == {expected}
    _, _, exact = trained(tmp_path / "32", model_path, torch.optim.AdamW)
    seen, expected = torch.tensor(recorder.norms), torch.tensor(exact.norms)
    torch.testing.assert_close(seen[0], expected[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(seen[:6], expected[:6], rtol=0.05, atol=0)
    assert not torch.equal(seen, expected)


def test_a_resumed_run_is_the_one_that_was_not_interrupted(tmp_path, model_path):
    _, whole, _ = trained(tmp_path / "whole", model_path, AdamW8bit, checkpoint=kept(tmp_path))
    _, resumed, _ = trained(tmp_path / "rest", model_path, AdamW8bit, ckpt_path=tmp_path / "step=6.ckpt")
    for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_learning_rate_in_a_tensor_that_was_changed_applies_on_resume(tmp_path, model_path):
    rates = [torch.tensor(1e-3), torch.tensor(3e-4)]
    trained(tmp_path / "whole", model_path, torch.optim.AdamW, lr=rates[0], checkpoint=kept(tmp_path))
    options = {"lr": rates[1], "ckpt_path": tmp_path / "step=6.ckpt"}
    trainer, _, _ = trained(tmp_path / "rest", model_path, torch.optim.AdamW, **options)
    assert float(trainer.optimizers[0].param_groups[0]["lr"]) == pytest.approx(3e-4)


def test_8_bit_states_are_refused_where_weights_are_sharded(model_path):
    with pytest.raises(ConfigurationError, match=r"model\.optimizer=AdamW8bit .* one rank, not 2"):
        _check_optimizer(SimpleNamespace(world_size=2), policy(model_path, optimizer=AdamW8bit))
    _check_optimizer(SimpleNamespace(world_size=2), policy(model_path))
    _check_optimizer(SimpleNamespace(world_size=1), policy(model_path, optimizer=AdamW8bit))
