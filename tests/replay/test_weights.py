import threading
from functools import partialmethod
from itertools import product

import numpy as np
import pytest

from freshper_lightning.replay import ExponentialDecay, InverseDecay, NothingToDraw
from freshper_lightning.replay.schemes import GumbelTopK, Picked
from freshper_lightning.replay.weights import Weighting
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import START, make_buffer, make_trajectory, of_rewards


class Ranks:
    """Runs one function per rank in threads, with a collective that exchanges rows between them."""

    def __init__(self, count):
        self.barrier, self.rows, self.calls = threading.Barrier(count, timeout=30), [None] * count, [0] * count

    def gather(self, rank):
        def collective(row):
            self.calls[rank] += 1
            self.rows[rank] = row
            self.barrier.wait()
            rows = np.stack(self.rows)
            self.barrier.wait()
            return rows

        return collective

    def run(self, functions):
        results = [None] * len(functions)

        def call(rank):
            try:
                results[rank] = functions[rank](self.gather(rank))
            except NothingToDraw as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def shards_of(rewards, decay, **parameters):
    """Entries of rank r come in at update 10 r, so that the scales of the shards differ."""
    shards = []
    for rank, values in enumerate(rewards):
        shards.append(make_buffer(decay=decay, seed=rank, alpha=0.6, **parameters))
        if values:
            shards[-1].add(of_rewards(*values), ClockReading(updates=10 * rank))
    return shards


def one_buffer(rewards, decay):
    buffer = make_buffer(decay=decay, alpha=0.6)
    for rank, values in enumerate(rewards):
        buffer.add(of_rewards(*values), ClockReading(updates=10 * rank))
    return buffer


NOW = ClockReading(updates=40)
SHARDS = [[(1, 2, 0, 7)], [(1, 2), (50,)], [(3, 0.1), (), (9, 9, 1, 1e-3)], [(), (4, 1), (0, 0)]]


@pytest.mark.parametrize("decay", [ExponentialDecay(tau=13), InverseDecay()])
@pytest.mark.parametrize("rewards", SHARDS)
@pytest.mark.parametrize("draw", ["stratified", "gumbel"])
def test_probabilities_over_all_ranks_and_weights_are_those_of_one_buffer(rewards, decay, draw):
    n, beta = 1 if draw == "gumbel" else 8, 0.7
    whole = one_buffer(rewards, decay).probabilities(NOW)
    firsts = np.cumsum([0] + [len(values) for values in rewards])
    ranks, shards = Ranks(len(rewards)), shards_of(rewards, decay, draw=draw)
    results = ranks.run([lambda gather, s=shard: s.sample(n, NOW, beta, gather) for shard in shards])
    assert ranks.calls == [1] * len(rewards)
    shares = [np.empty(0) if not len(d.ids) else whole[d.ids + f] for d, f in zip(results, firsts[:-1], strict=True)]
    rarest = min(share.min() for share in shares if len(share))
    for result, share, values, first in zip(results, shares, rewards, firsts[:-1], strict=True):
        assert len(result.ids) == (n if any(values) else 0)
        assert result.probabilities == pytest.approx(share, rel=1e-12)
        if draw == "stratified" and len(share):
            shard_share = whole[first : first + len(values)].sum()
            assert result.weights == pytest.approx((rarest / share) ** beta * len(rewards) * shard_share, rel=1e-12)


def test_probabilities_over_ranks_are_exact_where_the_latest_rank_is_the_least_fresh_by_far():
    late, decay = 10**9 + 7, ExponentialDecay(tau=50.7)
    shards = [make_buffer(decay=decay) for _ in range(3)]
    for shard, update in zip(shards, (0, 1, late), strict=True):
        shard.add(of_rewards(1), ClockReading(updates=update))
    shards[2].observe([0], [-3e7], ClockReading(updates=late))
    now = ClockReading(updates=late)
    results = Ranks(3).run([lambda gather, s=shard: s.sample(1, now, 1.0, gather) for shard in shards])
    share = 1 / (1 + np.exp(1 / 50.7))
    assert results[0].probabilities[0] == pytest.approx(share, rel=1e-12)
    assert results[1].probabilities[0] == pytest.approx(1 - share, rel=1e-12)


@pytest.mark.parametrize("rewards", SHARDS)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_weighted_parts_have_the_expectation_of_one_buffer(rewards, beta):
    check_expectation(rewards, beta)


def factor_with_an_exponent(weigh, self, log_a, worth, *rest):
    return weigh(self, log_a, worth**self.beta, *rest)


def no_factor(weigh, self, log_a, worth, *rest):
    return weigh(self, log_a, np.ones_like(worth), *rest)


@pytest.mark.parametrize("mutant", [factor_with_an_exponent, no_factor])
def test_the_enumeration_notices_a_wrong_factor_of_a_shard(mutant, monkeypatch):
    monkeypatch.setattr(Weighting, "_normalised", partialmethod(lambda self, *a: mutant(weigh, self, *a)))
    with pytest.raises(AssertionError):
        check_expectation(SHARDS[2], beta=0.4)


weigh = Weighting._normalised


def check_expectation(rewards, beta):
    """By enumeration: every combination of one entry per shard, with its probability."""
    decay, count = ExponentialDecay(tau=13), len(rewards)
    whole = one_buffer(rewards, decay).probabilities(NOW)
    firsts = np.cumsum([0] + [len(values) for values in rewards])
    masses = [shard._masses_at(NOW) for shard in shards_of(rewards, decay)]
    choices = [
        np.flatnonzero(m.of(np.arange(len(values)))).tolist() or [None]
        for m, values in zip(masses, rewards, strict=True)
    ]
    expectation = np.zeros(len(whole))
    for rows in product(*choices):
        picked = [None if row is None else one_row(m, row) for m, row in zip(masses, rows, strict=True)]
        chance = np.prod([float(p.shares[0]) for p in picked if p is not None])
        drawn = [first + row for first, row in zip(firsts, rows, strict=False) if row is not None]
        weights = np.concatenate([weighed.weights for weighed in weigh_all(picked, masses, beta, decay)])
        # A batch is divided by its own maximum; without that it is an unbiased estimate.
        expectation[drawn] += chance * weights * whole[drawn].min() ** -beta / count
    assert expectation[whole > 0] == pytest.approx(whole[whole > 0] ** (1 - beta), rel=1e-12)
    assert (expectation[whole == 0] == 0).all()


def one_row(masses, row):
    share = masses.of(np.array([row])) / masses.total
    return Picked(np.array([row]), share, share, masses.total)


def weigh_all(picked, masses, beta, decay, n=1):
    """What every rank gets: their rows are exchanged in a second round."""
    rows = []

    def record(row):
        rows.append(row)
        return row[None]

    for gather in (record, lambda row: np.stack(rows)):
        weighting = Weighting(0.6, beta, decay, "max", gather)
        results = [weighting.weigh(p, n, m.total, m.scale) for p, m in zip(picked, masses, strict=True)]
    return results


@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_the_weighted_parts_of_draws_without_replacement_have_the_expectation_of_one_buffer(beta):
    """By simulation, within 5 standard errors."""
    rewards, decay, n, batches = [(3, 0.1, 5, 2), (9, 9, 1, 1e-1, 4)], ExponentialDecay(tau=13), 2, 1500
    whole, shards = one_buffer(rewards, decay).probabilities(NOW), shards_of(rewards, decay, draw="gumbel")
    masses, random = [shard._masses_at(NOW) for shard in shards], np.random.default_rng(0)
    sums, squares = np.zeros(len(whole)), np.zeros(len(whole))
    for _ in range(batches):
        picked = [
            GumbelTopK().pick(m, shard._content.columns, n, random) for m, shard in zip(masses, shards, strict=True)
        ]
        drawn = np.concatenate([picked[0].rows, picked[1].rows + len(rewards[0])])
        weights = np.concatenate([weighed.weights for weighed in weigh_all(picked, masses, beta, decay, n)])
        values = np.zeros(len(whole))
        values[drawn] = weights * whole[drawn].min() ** -beta / (n * len(shards))
        sums, squares = sums + values, squares + values**2
    mean = sums / batches
    error = np.sqrt((squares / batches - mean**2) / batches)
    assert (np.abs(mean - whole ** (1 - beta)) <= 5 * error).all()


@pytest.mark.parametrize("rewards", SHARDS)
def test_weights_over_the_sum_add_up_to_the_batch_of_all_ranks(rewards):
    shards = shards_of(rewards, InverseDecay(), weights="sum")
    results = Ranks(len(shards)).run([lambda gather, s=shard: s.sample(8, NOW, 0.4, gather) for shard in shards])
    assert sum(result.weights.sum() for result in results) == pytest.approx(8 * len(shards), rel=1e-12)


def test_no_rank_draws_where_all_shards_are_empty_or_one_is_too_small():
    shards = shards_of([(), (0, 0)], InverseDecay())
    results = Ranks(2).run([lambda gather, s=shard: s.sample(2, NOW, 0.4, gather) for shard in shards])
    assert all(isinstance(result, NothingToDraw) for result in results)
    shards = shards_of([(1, 1, 1), (1,)], InverseDecay(), draw="gumbel")
    results = Ranks(2).run([lambda gather, s=shard: s.sample(2, NOW, 0.4, gather) for shard in shards])
    assert all(isinstance(result, NothingToDraw) for result in results)
    assert [shard.draws() for shard in shards] == [0, 0]


def test_one_rank_with_a_collective_is_one_buffer():
    alone, joined = (make_buffer(alpha=0.6, seed=4) for _ in range(2))
    for buffer in (alone, joined):
        buffer.add(of_rewards(1, 2, 30, 0.1), START)
    one, other = alone.sample(16, START, 0.4), joined.sample(16, START, 0.4, gather=lambda row: row[None])
    assert one.ids.tolist() == other.ids.tolist()
    assert one.weights.tobytes() == other.weights.tobytes()
    assert one.probabilities.tobytes() == other.probabilities.tobytes()


def test_weights_over_their_sum_have_mean_one_and_the_same_ratios():
    by_max, by_sum = (make_buffer(weights=over) for over in ("max", "sum"))
    for buffer in (by_max, by_sum):
        buffer.add(of_rewards(1, 2, 30, 0.1), START)
    one, other = by_max.sample(16, START, 0.4), by_sum.sample(16, START, 0.4)
    assert other.weights.mean() == pytest.approx(1.0, rel=1e-14)
    assert one.weights / one.weights.sum() == pytest.approx(other.weights / 16, rel=1e-14)


@pytest.mark.parametrize("rewards", SHARDS)
@pytest.mark.parametrize("draw", ["stratified", "gumbel"])
def test_multiplicities_say_of_how_many_draws_from_one_buffer_each_is_worth(rewards, draw):
    n, shards = 1 if draw == "gumbel" else 8, shards_of(rewards, InverseDecay(), draw=draw)
    results = Ranks(len(shards)).run([lambda gather, s=shard: s.sample(n, NOW, 0.0, gather) for shard in shards])
    for result in results:
        assert result.multiplicities.tolist() == pytest.approx(result.weights.tolist(), rel=1e-12)
    if draw == "stratified":
        assert sum(result.multiplicities.sum() for result in results) == pytest.approx(n * len(shards), rel=1e-12)
        alone = one_buffer(rewards, InverseDecay()).sample(n, NOW, 0.7)
        assert alone.multiplicities.tolist() == [1.0] * n


@pytest.mark.parametrize("draw", ["newest", "oldest"])
def test_buffers_count_alike_where_draws_go_by_age(draw):
    shards = shards_of([(1, 5, 9), (), (1e-9, 2e-9)], ExponentialDecay(tau=3), draw=draw)
    results = Ranks(3).run([lambda gather, s=shard: s.sample(2, NOW, 0.7, gather) for shard in shards])
    assert [len(result.ids) for result in results] == [2, 0, 2]
    for result in results:
        assert result.probabilities.tolist() == pytest.approx([0.25] * len(result.ids))
        assert result.weights.tolist() == pytest.approx([1.5] * len(result.ids))


@pytest.mark.parametrize("draw", ["newest", "oldest"])
@pytest.mark.parametrize("sizes", [(2, 4), (1, 5)])
def test_ranks_that_draw_unequal_parts_by_age_count_alike(draw, sizes):
    shards = shards_of([(1, 5, 9, 2, 2), (1, 2, 3, 4, 5)], ExponentialDecay(tau=3), draw=draw)
    pairs = zip(shards, sizes, strict=True)
    results = Ranks(2).run([lambda gather, s=shard, n=n: s.sample(n, NOW, 0.7, gather) for shard, n in pairs])
    for result, n in zip(results, sizes, strict=True):
        assert len(result.ids) == n
        assert result.probabilities.tolist() == pytest.approx([1 / (2 * n)] * n)
        worth = sum(sizes) / (2 * n)
        assert result.multiplicities.tolist() == pytest.approx([worth] * n)
        assert result.weights.tolist() == pytest.approx([(max(sizes) / n) ** -0.7 * worth] * n)


def test_whole_groups_over_ranks_have_the_probabilities_of_one_buffer():
    rewards, decay = [[(1, 2), (7, 2)], [], [(30, 4)]], ExponentialDecay(tau=13)
    shards = shards_of([()] * 3, decay, draw="groups")
    together = make_buffer(decay=decay, alpha=0.6, draw="groups")
    for rank, groups in enumerate(rewards):
        for group, values in enumerate(groups):
            items = [make_trajectory((float(value),), group=10 * rank + group) for value in values]
            for buffer in (shards[rank], together):
                buffer.add(items, ClockReading(updates=10 * rank))
    results = Ranks(3).run([lambda gather, s=shard: s.sample(8, NOW, 0.7, gather) for shard in shards])
    whole = together.probabilities(NOW).reshape(3, 2).mean(axis=1)
    for rank, result in enumerate(results):
        for key, probability in zip(result.ids.tolist(), result.probabilities.tolist(), strict=True):
            assert probability == pytest.approx(whole[rank + key // 2] / whole.sum() / 2, rel=1e-12)
    assert len(results[1].ids) == 0
