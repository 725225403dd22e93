"""Data modules without a run, and what goes into them."""

from types import SimpleNamespace

from freshper_lightning.replay import (
    WholeGroups,
)
from freshper_lightning.trajectory import ClockReading
from tests.loop import replay_data
from tests.replay.builders import make_trajectory

DRAWS = {
    "stratified": "stratified",
    "gumbel": "gumbel",
    "groups": "groups",
    "groups by their best": WholeGroups("max"),
    "newest": "newest",
    "oldest": "oldest",
}


def of_advantages(*advantages, group=0):
    """The rewards are the advantages."""
    return [
        make_trajectory((float(value),), advantages=(float(value),), group=group, member=member)
        for member, value in enumerate(advantages)
    ]


def bound(group_size=4, size=4, **fields):
    """A data module without a trainer: one rank, one micro-batch."""
    data = replay_data(**fields)
    data.bind(size, ClockReading, group_size)
    return data


def on_ranks(world_size, **fields):
    """A data module that its trainer has told the number of ranks; no process group is needed to be refused."""
    data = replay_data(**fields)
    data.trainer = SimpleNamespace(world_size=world_size, global_rank=0, accumulate_grad_batches=1)
    return data
