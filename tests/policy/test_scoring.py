"""Forward passes outside of an update: how much they hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning import Callback

from freshper_lightning.algorithms import GRPO, PPO
from freshper_lightning.policy.critic import CriticSettings
from freshper_lightning.policy.packing import collate
from freshper_lightning.policy.scoring import CONVERSATIONS_AT_ONCE, chunks
from freshper_lightning.replay import AbsoluteAdvantage, TDError
from tests.loop import fit, policy, replay_data
from tests.policy.transcripts import transcript

LIMIT = 160
"""That of a conversation in the runs of ``tests.loop``."""


@given(st.lists(st.integers(3, 60), max_size=30), st.sampled_from([None, 60, 130, 400]))
def test_passes_hold_all_conversations_in_order_within_the_limit(lengths, limit):
    items = [transcript(length, seed) for seed, length in enumerate(lengths)]
    passes = chunks(items, limit)
    assert [item for part in passes for item in part] == items
    assert all(1 <= len(part) <= CONVERSATIONS_AT_ONCE for part in passes)
    if limit is None:
        assert len(passes) == -(-len(items) // CONVERSATIONS_AT_ONCE)
    else:
        assert all(collate(part, phase="demonstration").input_ids.numel() <= limit for part in passes)


def test_a_conversation_beyond_the_limit_is_alone():
    items = [transcript(length, length) for length in (10, 50, 10, 10)]
    assert chunks(items, 30) == [items[:1], items[1:2], items[2:]]


class Sizes(Callback):
    """Tokens of each forward pass of policy and reference, ahead of the first update."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        for net in (pl_module.policy, pl_module.reference):
            if net is not None:
                net.register_forward_pre_hook(
                    lambda _, __, inputs: self.seen.append(inputs["input_ids"].numel()), with_kwargs=True
                )


@pytest.mark.parametrize(
    ("settings", "priority"),
    [
        ({"algorithm": GRPO(kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")}, AbsoluteAdvantage()),
        ({"algorithm": PPO(), "critic": CriticSettings()}, TDError()),
    ],
)
def test_no_forward_pass_of_a_run_holds_more_than_the_limit(tmp_path, model_path, settings, priority):
    sizes, module = Sizes(), policy(model_path, max_micro_batch_tokens=LIMIT, **settings)
    options = {"accumulate_grad_batches": 4, "iterations": 1, "enable_checkpointing": False}
    data = replay_data(priority=priority, epochs=0)  # so that collection runs the critic, too
    fit(tmp_path, module, data, extra=(sizes,), **options)
    assert max(sizes.seen) <= LIMIT < sum(sizes.seen[:8])
