from dataclasses import dataclass, field

import pytest

from datamodules.loader import IterationLoader
from freshper_lightning.errors import ConfigurationError
from tests.policy.transcripts import packed, transcript


@dataclass
class Source:
    """Three optimizer batches of so many micro-batches each; remembers what it was asked for."""

    micro_batches: int = 2
    updates_per_iteration: int = 3
    asked: list[int] = field(default_factory=list)
    epochs: int = 1

    def sizes(self):
        return {"data.epochs": self.epochs, "data.replay_updates": self.updates_per_iteration - self.epochs}

    def optimizer_batch(self, update):
        self.asked.append(update)
        return [packed([transcript(6, update)]) for _ in range(self.micro_batches)]


def test_nothing_is_asked_for_before_the_first_batch_is():
    source = Source()
    loader = IterationLoader(source)
    batches = iter(loader)
    assert (len(loader), source.asked) == (6, [])
    next(batches)
    assert source.asked == [0]
    next(batches)
    assert source.asked == [0]
    next(batches)
    assert source.asked == [0, 1]


def test_the_last_micro_batch_says_that_the_iteration_ends():
    assert [batch.ends_iteration for batch in IterationLoader(Source())] == [False] * 5 + [True]


@pytest.mark.parametrize(("taken", "left"), [(0, [0, 1, 2]), (2, [1, 2]), (4, [2]), (6, [0, 1, 2])])
def test_a_restored_loader_goes_on_where_the_saved_one_was_and_then_from_the_start(taken, left):
    """After a whole iteration the next one begins."""
    saved, source = IterationLoader(Source()), Source()
    batches = iter(saved)
    for _ in range(taken):
        next(batches)
    restored = IterationLoader(source)
    restored.load_state_dict(saved.state_dict())
    rest = list(restored)
    assert source.asked == left
    assert rest[-1].ends_iteration
    assert len(list(restored)) == 6


def test_rewinding_counts_batches_as_not_yet_handed_out():
    loader, source = IterationLoader(Source()), Source()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    loader.rewind(2)
    restored = IterationLoader(source)
    restored.load_state_dict(loader.state_dict())
    list(restored)
    assert source.asked == [1, 2]


def test_another_number_of_micro_batches_is_refused_by_key():
    loader = IterationLoader(Source(micro_batches=4))
    with pytest.raises(ValueError, match=r"trainer\.accumulate_grad_batches=4.*written with 2"):
        loader.load_state_dict(IterationLoader(Source()).state_dict())


def test_a_position_inside_an_optimizer_batch_is_refused():
    with pytest.raises(ValueError, match=r"inside an optimizer batch \(micro-batch 3 of 2\)"):
        IterationLoader(Source()).load_state_dict({"position": 3, "micro_batches": 2})


def test_a_finished_iteration_may_be_followed_by_longer_ones_and_an_unfinished_one_may_not():
    saved = IterationLoader(Source())
    batches = iter(saved)
    for _ in range(4):
        next(batches)
    longer = IterationLoader(Source(updates_per_iteration=5))
    with pytest.raises(ConfigurationError, match=r"data\.replay_updates=4, .* in the middle of an iteration with 2;"):
        longer.load_state_dict(saved.state_dict())
    list(batches)
    longer.load_state_dict(saved.state_dict())
    assert len(list(longer)) == 10


def test_iterations_of_equal_length_may_not_be_divided_otherwise_inside_one():
    """Two passes and one epoch of replay are as many updates as one pass and two epochs of replay."""
    saved = IterationLoader(Source())
    batches = iter(saved)
    for _ in range(4):
        next(batches)
    other = IterationLoader(Source(epochs=2))
    with pytest.raises(ConfigurationError, match=r"data\.epochs=2, but .* in the middle of an iteration with 1;"):
        other.load_state_dict(saved.state_dict())
    list(batches)
    other.load_state_dict(saved.state_dict())
