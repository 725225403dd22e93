"""Trajectories and buffers for tests: small, odd where asked for, always valid."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from freshper_lightning.replay import AbsoluteReward, NoDecay, ReplayBuffer
from freshper_lightning.trajectory import ClockReading, Trajectory

START = ClockReading()
TENSORS = ("token_ids", "turns", "behavior_log_probs", "rewards", "weight_versions", "advantages")


def make_trajectory(
    rewards: tuple[float, ...] = (1.0,),
    turn_tokens: tuple[int, ...] | None = None,
    advantages: tuple[float, ...] | None = None,
    **fields,
) -> Trajectory:
    """Turns of the given numbers of tokens (2 each by default), with one prompt token before every turn."""
    lengths = torch.tensor(turn_tokens or (2,) * len(rewards), dtype=torch.int32)
    ends = torch.cumsum(lengths + 1, 0).int()
    count = len(rewards)
    return Trajectory(
        token_ids=torch.arange(int(ends[-1]), dtype=torch.int32),
        turns=torch.stack([ends - lengths, ends], dim=1),
        behavior_log_probs=-0.1 - 0.3 * torch.arange(int(lengths.sum())),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        weight_versions=torch.arange(count),
        advantages=None if advantages is None else torch.tensor(advantages, dtype=torch.float32),
        **({"born": ClockReading(), "group": 0, "member": 0, "seed": 0, "task": "toy"} | fields),
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    """Every field of two trajectories is equal to the bit."""
    for name in Trajectory.__dataclass_fields__:
        first, second = getattr(one, name), getattr(other, name)
        assert type(first) is type(second), name
        if isinstance(first, Tensor):
            assert first.dtype == second.dtype, name
            assert first.numpy().tobytes() == second.numpy().tobytes(), name
            assert first.shape == second.shape, name
        else:
            assert first == second or (first != first and second != second), name


_floats = st.floats(allow_nan=True, allow_infinity=True)
_integers = st.integers(-(2**63), 2**63 - 1)


@st.composite
def trajectories(draw) -> Trajectory:
    """Any valid trajectory, with numbers as odd as its types allow."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    odd = st.lists(st.floats(width=32), min_size=len(lengths), max_size=len(lengths)).map(tuple)
    return make_trajectory(
        rewards=draw(odd),
        turn_tokens=tuple(lengths),
        advantages=draw(st.none() | odd),
        born=ClockReading(
            draw(st.integers(0, 2**62)), draw(st.integers(0, 2**62)), *(draw(st.floats(0)) for _ in range(3))
        ),
        **{name: draw(_integers) for name in ("group", "member", "seed", "invalid_turns")},
        **{name: draw(_floats) for name in ("format_penalty", "group_mean", "group_std")},
        success=draw(st.none() | st.booleans()),
        truncated=draw(st.booleans()),
        task=draw(st.text(max_size=5)),
        images=tuple(draw(st.lists(st.binary(max_size=5), max_size=3))),
    )


def make_buffer(**parameters):
    defaults = {"capacity": 100, "priority": AbsoluteReward(eps=0.0), "decay": NoDecay(), "alpha": 1.0}
    return ReplayBuffer(**(defaults | parameters))


def of_rewards(*rewards):
    return [make_trajectory(rewards=(reward,)) for reward in rewards]


def assert_same_draw(one, other):
    for name in ("ids", "probabilities", "weights", "ages"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype
        assert first.tobytes() == second.tobytes(), name
    for item, copy in zip(one.trajectories, other.trajectories, strict=True):
        assert_same(item, copy)
