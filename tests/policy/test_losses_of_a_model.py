"""Every loss on a real model: packing changes no gradient, and neither does the way through the buffer."""

import pytest
import torch

from freshper_lightning.algorithms import GSPO, M2PO, MIS, DecoupledPPO, LossInputs, Reinforce
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.packing import TrajectoryBatch
from freshper_lightning.replay import NoDecay, ReplayBuffer, UniformPriority
from freshper_lightning.trajectory import ClockReading
from tests.algorithms.menu import CRITIC, POLICIES, name_of
from tests.policy.transcripts import packed, statistics, trajectory

ITEMS = [trajectory(length, seed, advantage=(-1.0) ** seed * (1 + seed)) for seed, length in enumerate((9, 30, 12, 17))]
TOTALS = (float(sum(item.num_sampled for item in ITEMS)), float(len(ITEMS)))


@pytest.fixture(scope="module")
def net(model_path):
    return PolicyNet.from_pretrained(model_path)


def gradient(net, algorithm, batches: list[TrajectoryBatch], on_policy: bool = False) -> torch.Tensor:
    """All parameters' gradients, flat; ``on_policy`` takes the model's own log-probs for the behavior's."""
    net.zero_grad()
    for batch in batches:
        log_probs = statistics(net, batch).log_probs
        behavior = log_probs.detach() if on_policy else batch.behavior_log_probs
        inputs = LossInputs(
            log_probs,
            behavior,
            batch.advantages,
            algorithm.coefficients(batch.segments, batch.lengths, *TOTALS),
            batch.importance_weights[batch.segments],
            batch.segments,
            batch.lengths,
            proximal_log_probs=behavior + 0.1 * torch.sin(batch.targets) * (not on_policy),
            reference_log_probs=behavior,
            entropy=statistics(net, batch).entropy,
            **dict.fromkeys(CRITIC, 0 * behavior),
        )
        algorithm.loss(inputs).loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "algorithm",
    [Reinforce(), GSPO(clip=0.2, clip_high=0.2), M2PO(), MIS(weight_cap=50.0), DecoupledPPO(weight_level="geometric")],
    ids=name_of,
)
def test_rows_their_order_and_micro_batches_change_no_gradient(net, algorithm):
    together = packed(ITEMS)
    assert together.input_ids.shape[0] < len(ITEMS), "two conversations must share a row"
    expected = gradient(net, algorithm, [together])
    assert expected.abs().max() > 0
    for split in ([[3, 1, 0, 2]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        batches = [packed([ITEMS[index] for index in part]) for part in split]
        torch.testing.assert_close(gradient(net, algorithm, batches), expected, rtol=1e-4, atol=1e-6)


def from_the_buffer() -> TrajectoryBatch:
    """The trajectories as a replay batch drawn at the moment they went in: each once, by its id."""
    buffer = ReplayBuffer(capacity=8, priority=UniformPriority(), decay=NoDecay(), clock="updates", alpha=0.6, seed=0)
    now = ClockReading()
    ids = buffer.add(ITEMS, now)
    draws = [buffer.sample(4, now, beta=1.0) for _ in range(20)]
    weights = {int(i): float(w) for draw in draws for i, w in zip(draw.ids, draw.weights, strict=True)}
    assert sorted(weights) == ids.tolist(), "every trajectory must have been drawn"
    assert not any(draw.ages.any() for draw in draws)
    stored = torch.tensor([weights[int(i)] for i in ids])
    return packed(list(buffer.get(ids)), phase="replay", importance_weights=stored, ids=torch.from_numpy(ids))


@pytest.mark.parametrize("algorithm", POLICIES, ids=name_of)
def test_a_fresh_sample_replayed_at_age_zero_has_the_gradient_of_the_on_policy_update(net, algorithm):
    replayed = gradient(net, algorithm, [from_the_buffer()], on_policy=True)
    fresh = gradient(net, algorithm, [packed(ITEMS)], on_policy=True)
    torch.testing.assert_close(replayed, fresh, rtol=1e-6, atol=1e-6)
    plain = Reinforce(
        aggregation=algorithm.aggregation,
        aggregation_length=algorithm.aggregation_length,
        entropy_coefficient=algorithm.entropy_coefficient,
    )
    torch.testing.assert_close(replayed, gradient(net, plain, [packed(ITEMS)], on_policy=True), rtol=1e-4, atol=1e-6)
