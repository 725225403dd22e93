"""Where nothing is learned nothing may change: the strongest check that engine and trainer are one policy."""

import pytest
import torch

from freshper_lightning.algorithms import GRPO, PPO, DecoupledGRPO
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.replay import AbsoluteAdvantage, AbsoluteReward
from freshper_lightning.rollout.sampling import SamplingConfig
from tests.loop import Recorder, fit, policy, replay_data, rollout_callback


@pytest.mark.parametrize(
    ("engine", "optimizer", "temperature", "algorithm"),
    [
        ("transformers", torch.optim.AdamW, 1.0, GRPO(kl_coefficient=0.1, dual_clip=3.0)),
        ("transformers", torch.optim.AdamW, 0.7, DecoupledGRPO(kl_coefficient=0.1)),
        ("transformers", torch.optim.AdamW, 1.0, PPO(kl_coefficient=0.1, value_clip=0.2)),
        ("transformers", torch.optim.SGD, 0.7, GRPO(kl_coefficient=0.1)),
        pytest.param("vllm", torch.optim.AdamW, 0.7, GRPO(kl_coefficient=0.1), marks=pytest.mark.vllm),
    ],
)
def test_with_learning_rate_zero_every_ratio_is_one_for_a_whole_run(
    tmp_path, model_path, engine, optimizer, temperature, algorithm
):
    recorder = Recorder()
    rollout = rollout_callback(engine=engine, sampling=SamplingConfig(temperature=temperature, max_tokens=6))
    critic = CriticSettings() if algorithm.needs_critic() else None
    settings = {"algorithm": algorithm, "temperature": temperature, "critic": critic}
    module = policy(model_path, lr=0.0, optimizer=optimizer, **settings)
    data = replay_data(priority=AbsoluteReward() if critic else AbsoluteAdvantage())
    trainer = fit(tmp_path, module, data, rollout=rollout, iterations=4, extra=(recorder,))
    assert trainer.callbacks[0].clock.updates == 4 * 3 * 2
    assert max(float(batch.ages.max()) for batch in recorder.batches) > 10, "replay must have reached old data"
    assert max(float((ratio - 1).abs().max()) for ratio in recorder.metric("ratio")) < 1e-5
    assert max(float(kl.max()) for kl in recorder.metric("kl_behavior")) < 1e-9
    assert max(float(kl.abs().max()) for kl in recorder.metric("kl_reference")) == 0
    for name in ("clipped", "value_clipped") if critic else ("clipped",):
        assert sum(float(clipped.sum()) for clipped in recorder.metric(name)) == 0
    if algorithm.needs_proximal():
        assert max(float((weight - 1).abs().max()) for weight in recorder.metric("weight")) < 1e-5
    assert all(norm > 0 for norm in recorder.norms), "a gradient of 0 would leave the policy alone too"
    scalars = read_scalars(trainer.log_dir)
    for phase in ("fresh", "replay"):
        for _, value in scalars[f"update/{phase}/ess_sequence"]:
            assert value == pytest.approx(1.0, abs=1e-6)
