"""AdamW with its state in 8 bits."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from tests.loop import Recorder, fit, policy, replay_data


@pytest.fixture(autouse=True)
def _eager():
    """The arithmetic is the same without compilation, which would take a compiler and a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def trained(folder, path, optimizer, **options):
    recorder, module = Recorder(), policy(path, lr=options.pop("lr", 1e-3), optimizer=optimizer)
    trainer = fit(folder, module, replay_data(), extra=(recorder,), **options)
    return trainer, module, recorder


def test_states_are_8_bit_and_training_is_close_to_that_of_adamw(tmp_path, model_path):
    trainer, module, recorder = trained(tmp_path / "8", model_path, AdamW8bit)
    states = trainer.optimizers[0].state
    for parameter in module.parameters():
        large = parameter.numel() >= 4096 and parameter.numel() % 256 == 0
        assert isinstance(states[parameter]["exp_avg"], OptimState8bit) == large
    assert any(isinstance(state["exp_avg"], OptimState8bit) for state in states.values())
    _, _, exact = trained(tmp_path / "32", model_path, torch.optim.AdamW)
    seen, expected = torch.tensor(recorder.norms), torch.tensor(exact.norms)
    torch.testing.assert_close(seen[:2], expected[:2], rtol=1e-3, atol=0)
    torch.testing.assert_close(seen, expected, rtol=0.3, atol=0)


def test_a_resumed_run_is_the_one_that_was_not_interrupted(tmp_path, model_path):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    _, whole, _ = trained(tmp_path / "whole", model_path, AdamW8bit, checkpoint=keep)
    _, resumed, _ = trained(tmp_path / "rest", model_path, AdamW8bit, ckpt_path=tmp_path / "step=6.ckpt")
    for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_learning_rate_that_was_changed_applies_on_resume(tmp_path, model_path):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    trained(tmp_path / "whole", model_path, AdamW8bit, checkpoint=keep)
    options = {"ckpt_path": tmp_path / "step=6.ckpt", "lr": 3e-4}
    trainer, _, _ = trained(tmp_path / "rest", model_path, AdamW8bit, **options)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert float(rate) == pytest.approx(3e-4)
