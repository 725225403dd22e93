import math
import shutil
from datetime import timedelta
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Timer,
)
from lightning.pytorch.plugins import MixedPrecision

from datamodules.demonstrations import DemonstrationsDataModule
from freshper_lightning.algorithms import GRPO, PPO, SFT, DecoupledGRPO, ESSGuard, Reinforce
from freshper_lightning.callbacks.evaluation import EvaluationCallback
from freshper_lightning.callbacks.progress import LoopProgress
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.lora import LoraSettings
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.replay import TDError
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.factory import EngineConfig
from freshper_lightning.rollout.sampling import SamplingConfig
from tests.loop import fit, policy, replay_data, rollout_callback
from tests.loop import trainer as make_trainer


def demonstrations():
    return DemonstrationsDataModule(lambda seed: [("q", "a")], episodes=4, batch_size=2)


@pytest.fixture(autouse=True)
def _no_model_is_loaded(monkeypatch):
    def never(*_):
        raise AssertionError("a model was loaded before the configuration was refused")

    monkeypatch.setattr(PolicyNet, "from_pretrained", never)


@pytest.mark.parametrize(
    ("module", "data", "rollout", "message"),
    [
        ({"temperature": 0.5}, {}, {}, r"model\.temperature=0\.5 must equal rollout\.sampling\.temperature=1\.0"),
        ({}, {}, {"group_size": 1, "groups": 8}, r"rollout\.group_size=1 must be at least 2 .*'mean_std'"),
        ({"algorithm": Reinforce(baseline="mean")}, {}, {"group_size": 1, "groups": 8}, r"group_size=1.*'mean'"),
        ({}, {"priority": TDError()}, {}, r"data\.priority=TDError needs a critic.*GRPO.*AbsoluteAdvantage"),
        (
            {"algorithm": PPO()},
            {"priority": TDError()},
            {},
            r"model\.critic=null, but model\.algorithm=PPO.*set model\.critic=\{\}",
        ),
        (
            {"critic": CriticSettings()},
            {},
            {},
            r"model\.critic=CriticSettings\(detached=False\).*model\.algorithm=GRPO.*allowed: null, or.*PPO",
        ),
        (
            {"algorithm": PPO(), "critic": CriticSettings()},
            {},
            {},
            r"data\.priority=AbsoluteAdvantage.*model\.algorithm=PPO.*allowed: TDError",
        ),
        (
            {"algorithm": PPO(value_clip=0.2), "critic": CriticSettings()},
            {"batch_size": 8, "priority": TDError()},
            {},
            r"value_clip=0\.2 needs at least 2 optimizer batches.*data\.batch_size=8.*allowed: null",
        ),
        (
            {"algorithm": Reinforce(group_filter=0.0)},
            {},
            {"group_size": 1, "groups": 8},
            r"group_size=1.*group_filter=0",
        ),
        (
            {"algorithm": DecoupledGRPO()},
            {"batch_size": 8},
            {},
            r"correction='decoupled' needs at least 2 optimizer batches.*data\.batch_size=8.*=importance_sampling",
        ),
        (
            {"max_micro_batch_tokens": 159},
            {},
            {},
            r"max_micro_batch_tokens=159 must be at least rollout\.engine\.max_model_len=160",
        ),
        (
            {"guard": ESSGuard(ess_token=0.5)},
            {"replay_updates": 0},
            {},
            r"model\.guard=ESSGuard\(ess_token=0\.5.*data\.replay_updates=0 makes none; .*at least 1",
        ),
        ({"algorithm": SFT()}, {}, {}, r"data=ReplayDataModule .*model\.algorithm=SFT.*demonstrations"),
        ({}, {"batch_size": 3}, {}, r"data\.batch_size=3 must divide rollout\.groups x rollout\.group_size = 8"),
        ({}, {"batch_size": 4, "capacity": 4}, {}, r"data\.capacity=4 must be at least one iteration \(8\)"),
        ({}, {}, {"environment": EnvironmentConfig("Lake-v0")}, r"rollout\.environment.*'Lake-v0' is not registered"),
        (
            {},
            {},
            {"environment": EnvironmentConfig("tests/HashScore-v0", {"size": 4})},
            r"rollout\.environment.*'size'.*its arguments are: levels, fails_every",
        ),
        (
            {},
            {},
            {"environment": EnvironmentConfig("FrozenLake-v1")},
            r"rollout\.environment.*FrozenLake-v1.*must be a gymnasium\.spaces\.Text",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, model_path, module, data, rollout, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, policy(model_path, **module), replay_data(**data), rollout=rollout_callback(**rollout))


def test_rollouts_of_another_temperature_are_refused_whichever_key_was_changed(tmp_path, model_path):
    rollout = rollout_callback(sampling=SamplingConfig(temperature=0.7, max_tokens=6))
    with pytest.raises(ConfigurationError, match=r"model\.temperature=1\.0.*rollout\.sampling\.temperature=0\.7"):
        fit(tmp_path, policy(model_path), replay_data(), rollout=rollout)


def test_a_policy_gradient_on_demonstrations_is_refused(tmp_path, model_path):
    with pytest.raises(ConfigurationError, match=r"data=DemonstrationsDataModule.*GRPO.*ReplayDataModule"):
        fit(tmp_path, policy(model_path, algorithm=GRPO()), demonstrations())


def test_a_guard_of_replay_updates_is_refused_where_there_is_no_replay(tmp_path, model_path):
    module = policy(model_path, algorithm=SFT(), guard=ESSGuard(ess_token=0.5))
    with pytest.raises(ConfigurationError, match=r"model\.guard=ESSGuard.*a data module without replay makes none"):
        fit(tmp_path, module, demonstrations())


def test_a_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"model\.path='.*nothing'.*no config\.json"):
        fit(tmp_path, policy(tmp_path / "nothing"), replay_data())


def test_a_group_of_one_is_no_trouble_without_a_baseline(tmp_path, model_path):
    rollout = rollout_callback(groups=8, group_size=1)
    with pytest.raises(AssertionError, match="a model was loaded"):
        fit(tmp_path, policy(model_path, algorithm=Reinforce(baseline="none")), replay_data(), rollout=rollout)


def test_lines_of_progress_need_an_interval():
    with pytest.raises(ValueError, match=r"progress\.line_every=0 must be at least 1"):
        LoopProgress(line_every=0)


@pytest.mark.parametrize(
    ("rollout", "trainer", "message"),
    [
        ({}, {"limit_train_batches": 3}, r"trainer\.limit_train_batches=3.*must be 1\.0"),
        ({}, {"limit_train_batches": 1}, r"trainer\.limit_train_batches=1 .*must be 1\.0"),
        ({}, {"precision": "bf16-true"}, r"trainer\.precision=bf16-true must be one of 32-true, bf16-mixed"),
        (
            {"engine_config": EngineConfig(name="transformers", max_model_len=4096)},
            {},
            r"rollout\.engine\.max_model_len=4096 must be at most 256",
        ),
        (
            {},
            {"plugins": [MixedPrecision("16-mixed", "cuda")]},  # its name alone means bf16-mixed on a CPU
            r"trainer\.precision=16-mixed must be one of 32-true, bf16-mixed: .*overflows",
        ),
        ({}, {"order": "evaluation first"}, r"EvaluationCallback must come after RolloutCallback"),
        (
            {},
            {"accumulate_grad_batches": 2, "checkpoint": ModelCheckpoint(train_time_interval=timedelta(seconds=1))},
            r"checkpoint\.train_time_interval must be null where trainer\.accumulate_grad_batches=2",
        ),
        (
            {},
            {"checkpoint": ModelCheckpoint(save_on_exception=True)},
            r"ModelCheckpoint must not save on exceptions .*every_n_train_steps",
        ),
        (
            {},
            {"extra": (GradientAccumulationScheduler({0: 1, 4: 2}),)},
            r"must not have a GradientAccumulationScheduler.*trainer\.accumulate_grad_batches",
        ),
    ],
)
def test_a_trainer_that_would_train_something_else_is_refused(tmp_path, model_path, rollout, trainer, message):
    callback = rollout_callback()
    callback.engine_config = rollout.get("engine_config", callback.engine_config)
    run = make_trainer(tmp_path, rollout=callback, **{k: v for k, v in trainer.items() if k != "order"})
    if "order" in trainer:
        run.callbacks.insert(0, EvaluationCallback(episodes=1))
    with pytest.raises(ConfigurationError, match=message):
        run.fit(policy(model_path), datamodule=replay_data())


def test_a_saver_on_exceptions_is_refused(tmp_path, model_path):
    with pytest.raises(ConfigurationError, match="OnExceptionCheckpoint must not save on exceptions"):
        fit(tmp_path, policy(model_path), replay_data(), extra=(OnExceptionCheckpoint(tmp_path / "saved"),))


def test_an_engine_that_is_not_installed_is_refused(tmp_path, model_path, monkeypatch):
    monkeypatch.setattr("freshper_lightning.rollout.factory.find_spec", lambda name: None)
    callback = rollout_callback(engine="vllm")
    with pytest.raises(ConfigurationError, match=r"rollout\.engine: .*'vllm'.*not installed"):
        fit(tmp_path, policy(model_path), replay_data(), rollout=callback)


def test_a_chat_template_whose_end_never_stops_a_reply_is_refused(tmp_path, model_path):
    broken = tmp_path / "model"
    shutil.copytree(model_path, broken)
    (broken / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(ConfigurationError, match=r"model\.path.*ends a reply with .*not among the eos_token_id \[0\]"):
        fit(tmp_path, policy(broken), replay_data())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr": -1.0},
            r"model\.optimizer: Invalid learning rate: -1\.0; allowed: .*learning rate is finite and at least 0",
        ),
        ({"lr": float("nan")}, r"model\.optimizer: Invalid learning rate: nan"),
        ({"lr": float("inf")}, r"model\.optimizer\.lr=inf must be finite"),
        (
            {"optimizer": partial(torch.optim.AdamW, betas=(0.9, 1.5))},
            r"model\.optimizer: Invalid beta parameter.*1\.5",
        ),
        ({"optimizer": torch.optim.Muon}, r"model\.optimizer: Muon only supports 2D parameters"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, r"model\.scheduler=ReduceLROnPlateau waits for a"),
        (
            {"scheduler": partial(torch.optim.lr_scheduler.LinearLR, start_factor=-2.0)},
            r"model\.scheduler: .*[Ss]tarting multiplicative factor",
        ),
    ],
)
def test_an_optimizer_or_a_schedule_that_cannot_be_is_refused(tmp_path, model_path, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, policy(model_path, **settings), replay_data())


@pytest.mark.parametrize(
    ("optimizer", "lora"),
    [(torch.optim.SGD, None), (torch.optim.AdamW, None), (torch.optim.Muon, LoraSettings(r=2))],
)
def test_an_optimizer_that_can_be_is_not_refused(tmp_path, model_path, optimizer, lora):
    with pytest.raises(AssertionError, match="a model was loaded"):
        fit(tmp_path, policy(model_path, optimizer=optimizer, lora=lora), replay_data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": -1.0}, r"trainer\.gradient_clip_val=-1\.0 must be finite and at least 0"),
        ({"gradient_clip_val": math.nan}, r"trainer\.gradient_clip_val=nan must be finite"),
        ({"max_time": "00:01:00:00"}, r"trainer\.max_time must be null, and a Timer .* interval: epoch"),
        ({"extra": (EarlyStopping("rollout/return"),)}, "EarlyStopping: monitor=rollout/return must be a metric of ev"),
        ({"extra": (ModelCheckpoint(save_on_train_epoch_end=False),)}, "save_on_train_epoch_end=False would save at"),
        ({"extra": (ModelCheckpoint(dirpath=__file__),)}, r"checkpoint\.dirpath='.*test_checks\.py' must be a folder"),
    ],
)
def test_options_of_lightning_that_would_lose_something_are_refused(tmp_path, model_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, policy(model_path), replay_data(), **options)


def test_a_timer_that_waits_for_the_end_of_an_iteration_is_not_refused(tmp_path, model_path):
    with pytest.raises(AssertionError, match="a model was loaded"):
        fit(tmp_path, policy(model_path), replay_data(), extra=(Timer("00:01:00:00", interval="epoch"),))
