import pytest
import torch
from lightning import Callback
from transformers import AutoTokenizer

from datamodules.demonstrations import DemonstrationsDataModule
from freshper_lightning.algorithms.algorithm import SFT
from freshper_lightning.callbacks.report import read_scalars
from freshper_lightning.errors import ConfigurationError
from tests.loop import Recorder, fit, policy


def demonstrate(seed, turns):
    """A dialogue of one to ``turns`` turns that names its seed."""
    return [(f"q{seed % 1000}.{turn}", f"a{seed % 1000}.{turn}") for turn in range(1 + seed // 2 % turns)]


def demonstrations(**fields):
    return DemonstrationsDataModule(
        demonstrate, **({"arguments": {"turns": 3}, "episodes": 12, "batch_size": 6, "seed": 1} | fields)
    )


class Gradients(Callback):
    def __init__(self):
        self.vectors = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.vectors.append(torch.cat([p.grad.flatten().double() for p in pl_module.parameters()]))


def test_the_same_loop_learns_demonstrations_by_heart(tmp_path, model_path):
    recorder = Recorder()
    module = policy(model_path, lr=1e-2, algorithm=SFT())
    trainer = fit(tmp_path, module, demonstrations(), extra=(recorder,), iterations=12)
    losses = [float(seen.loss) for seen in recorder.observations]
    assert losses[0] == pytest.approx(5.75, abs=0.2), "an untrained model is uniform over 320 tokens"
    assert losses[-1] < 0.6 * losses[0]
    logged = read_scalars(trainer.log_dir)["update/demonstration/loss"]
    assert [step for step, _ in logged] == list(range(2, 25, 2))
    assert logged[0][1] == pytest.approx(sum(losses[:2]) / 2, rel=1e-5)
    assert recorder.batches[0].phase == "demonstration"


def test_only_replies_are_trained_on_and_each_ends_with_the_stop_token(tmp_path, model_path):
    recorder, data = Recorder(), demonstrations()
    fit(tmp_path, policy(model_path, algorithm=SFT()), data, extra=(recorder,), iterations=1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    for item in data.demonstrations:
        text, user = tokenizer.decode(item.token_ids), tokenizer.decode(item.token_ids[~item.sampled_mask()])
        replies = tokenizer.decode(item.token_ids[item.sampled_mask()]).split("<|im_end|>")
        assert replies.pop() == ""
        assert len(replies) == item.num_turns
        assert all(reply.startswith("a") for reply in replies)
        number = replies[0][1:].split(".")[0]
        assert text.startswith(f"<|im_start|>user\nq{number}.0<|im_end|>\n<|im_start|>assistant\na{number}.0<|im_end|>")
        assert f"a{number}" not in user


def test_observations_after_the_first_reply_are_trained_on_where_asked_and_nothing_else_changes(tmp_path, model_path):
    seen = {}
    for observations in (False, True):
        recorder, data = Recorder(), demonstrations(observations=observations)
        fit(tmp_path, policy(model_path, algorithm=SFT()), data, extra=(recorder,), iterations=1)
        seen[observations] = data.demonstrations
        assert sum(batch.targets.numel() for batch in recorder.batches) == sum(
            d.num_sampled for d in data.demonstrations
        )
    for replies, everything in zip(seen[False], seen[True], strict=True):
        assert torch.equal(replies.token_ids, everything.token_ids)
        assert everything.turns.tolist() == [[int(replies.turns[0, 0]), replies.num_tokens]]
    assert any(item.num_turns > 1 for item in seen[False])


def test_every_pass_takes_each_demonstration_once_in_an_order_of_its_own(tmp_path, model_path):
    recorder, data = Recorder(), demonstrations()
    fit(tmp_path, policy(model_path, lr=0.0, algorithm=SFT()), data, extra=(recorder,))
    expected = sorted(item.token_ids[item.sampled_mask()].tolist() for item in data.demonstrations)
    passes = []
    for first in (0, 2):
        batches = recorder.batches[first : first + 2]
        replies = [batch.targets[batch.segments == i].tolist() for batch in batches for i in range(6)]
        assert sorted(replies) == expected
        passes.append(replies)
    assert passes[0] != passes[1]


def test_resampled_demonstrations_are_new_in_every_pass_and_the_same_in_every_run(tmp_path, model_path):
    runs = []
    for name in ("first", "second"):
        recorder = Recorder()
        module, data = policy(model_path, lr=0.0, algorithm=SFT()), demonstrations(resample=True)
        fit(tmp_path / name, module, data, extra=(recorder,), iterations=3)
        runs.append([tuple(batch.targets.tolist()) for batch in recorder.batches])
    assert runs[0] == runs[1]
    replies = [
        tuple(batch.targets[batch.segments == i].tolist()) for batch in recorder.batches for i in range(len(batch.ids))
    ]
    assert len(set(replies)) == len(replies) == 3 * 12


def test_gradients_do_not_depend_on_accumulation(tmp_path, model_path):
    runs = []
    for accumulate in (1, 2, 4):
        gradients, module = Gradients(), policy(model_path, lr=0.05, algorithm=SFT(), optimizer=torch.optim.SGD)
        options = {"extra": (gradients,), "iterations": 1, "accumulate_grad_batches": accumulate}
        fit(tmp_path / str(accumulate), module, demonstrations(), **options)
        runs.append(gradients.vectors)
    for other in runs[1:]:
        for mine, theirs in zip(runs[0], other, strict=True):
            assert (mine - theirs).norm() <= 1e-6 * mine.norm()


def test_a_batch_that_does_not_divide_the_demonstrations_is_refused():
    with pytest.raises(ValueError, match=r"data\.batch_size=5 must divide data\.episodes=12"):
        demonstrations(batch_size=5)


def play_nothing(seed):
    """A demonstrator that finds no way to play."""
    return []


def test_a_demonstration_without_a_turn_is_refused_by_name(tmp_path, model_path):
    data = DemonstrationsDataModule(play_nothing, episodes=12, batch_size=6, seed=1)
    with pytest.raises(ConfigurationError, match=r"data\.demonstrate=play_nothing .* no turn in the demonstration"):
        fit(tmp_path, policy(model_path, algorithm=SFT()), data)
