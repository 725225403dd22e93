"""What a resumed run takes from the configuration and what from the checkpoint, and what it refuses."""

from functools import partial

import pytest
import torch

from freshper_lightning.errors import ConfigurationError, NonFiniteError
from tests.loop import fit, policy, replay_data


@pytest.fixture(scope="module")
def last(model_path, tmp_path_factory):
    run = fit(tmp_path_factory.mktemp("run"), policy(model_path, lr=1e-2), replay_data(), iterations=1)
    return run.checkpoint_callback.last_model_path


def test_a_changed_learning_rate_is_applied(last, model_path, tmp_path, caplog):
    run = fit(tmp_path, policy(model_path, lr=1e-3), replay_data(), ckpt_path=last, iterations=2)
    assert run.optimizers[0].param_groups[0]["lr"] == 1e-3
    assert "lr=0.001 instead of the checkpoint's 0.01" in caplog.text


@pytest.mark.parametrize("scheduler", [None, partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)])
def test_another_kind_of_optimizer_is_refused(last, model_path, tmp_path, scheduler):
    module = policy(model_path, optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=scheduler)
    with pytest.raises(ConfigurationError, match=r"model\.optimizer=SGD must be AdamW as in the checkpoint"):
        fit(tmp_path, module, replay_data(), ckpt_path=last, iterations=2)


def test_a_checkpoint_without_a_buffer_is_refused(last, model_path, tmp_path):
    state = torch.load(last, weights_only=True)
    del state["ReplayDataModule"]
    torch.save(state, tmp_path / "bare.ckpt")
    with pytest.raises(ConfigurationError, match=r"bare\.ckpt.*holds no replay buffer.*freshper export"):
        fit(tmp_path, policy(model_path), replay_data(), ckpt_path=str(tmp_path / "bare.ckpt"), iterations=2)


def test_an_update_that_breaks_the_parameters_stops_the_run_and_is_not_saved(model_path, tmp_path):
    def overflowing(parameters, lr, weight_decay):
        return torch.optim.SGD(parameters, lr=1e30, weight_decay=1e30)

    module = policy(model_path, optimizer=overflowing)
    with pytest.raises(NonFiniteError, match=r"update on a fresh batch.*made parameters NaN or infinite"):
        fit(tmp_path, module, replay_data())
    assert not list(tmp_path.rglob("*.ckpt"))
