import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.replay import ExponentialDecay, Learnability, UniformPriority, columns, reshard
from freshper_lightning.replay.codec import encode, possible_turns
from freshper_lightning.replay.wholeness import checksum
from freshper_lightning.trajectory import ClockReading
from tests.replay.builders import (
    START,
    assert_same,
    assert_same_draw,
    make_buffer,
    make_trajectory,
    of_rewards,
    trajectories,
)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def filled_buffer(**parameters):
    buffer = make_buffer(capacity=20, decay=ExponentialDecay(tau=3), alpha=0.6, **parameters)
    for update in range(6):
        items = [make_trajectory((update + 0.1 * k,), images=(b"png",) * k, success=k > 2) for k in range(5)]
        buffer.add(items, ClockReading(updates=update))
    buffer.sample(4, ClockReading(updates=6), beta=0.4)
    buffer.update_priorities([11, 12], [0.0, 3.3])
    buffer.observe([13], [-0.7], ClockReading(updates=6))
    return buffer


def test_sampling_goes_on_exactly_after_a_restart():
    now, buffer = ClockReading(updates=7), filled_buffer(seed=5)
    restored = make_buffer(capacity=20, decay=ExponentialDecay(tau=3), alpha=0.6, seed=5)
    restored.load_state_dict(saved_and_loaded(buffer.state_dict()))
    assert (restored.draws(), restored.nbytes, len(restored)) == (buffer.draws(), buffer.nbytes, len(buffer))
    for _ in range(5):
        assert_same_draw(buffer.sample(8, now, beta=0.4), restored.sample(8, now, beta=0.4))
    assert buffer.add(of_rewards(1), now).tolist() == restored.add(of_rewards(1), now).tolist() == [30]
    assert buffer.probabilities(now).tobytes() == restored.probabilities(now).tobytes()


def test_a_state_is_equal_to_the_bit_after_a_round_trip():
    first = filled_buffer().state_dict()
    restored = make_buffer(capacity=20)
    restored.load_state_dict(saved_and_loaded(first))
    second = restored.state_dict()
    for part in ("columns", "trajectories"):
        for name, column in first[part].items():
            same = column == second[part][name]
            assert same if isinstance(column, list) else _same_bytes(column, second[part][name]), name
    scalars = ("format_version", "clock", "priority", "next_id", "evicted", "draws", "end", "scale", "checksum")
    assert [first[name] for name in scalars] == [second[name] for name in scalars]


def _same_bytes(one, other):
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


def test_an_empty_buffer_can_be_saved():
    restored = filled_buffer()
    restored.load_state_dict(saved_and_loaded(make_buffer().state_dict()))
    assert (len(restored), restored.nbytes, restored.draws()) == (0, 0, 0)


def test_a_saved_state_does_not_change_with_the_buffer():
    buffer = make_buffer()
    buffer.add(of_rewards(1, 1), START)
    state = buffer.state_dict()
    buffer.update_priorities([0], [8.0])
    assert state["columns"]["log_base"].tolist() == [0.0, 0.0]
    other = make_buffer()
    other.load_state_dict(state)
    state["columns"]["log_base"].fill_(7.0)
    assert other.probabilities(START).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clock": "iterations"}, "clock of the saved replay buffer must be 'iterations', not 'updates'"),
        ({"priority": UniformPriority()}, r"priority of the saved .* must be 'UniformPriority\(\)'"),
        ({"capacity": 19}, "at most the capacity, 19, not 20"),
        ({"max_bytes": 100}, "at most max_bytes, 100"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(parameters, message):
    buffer = make_buffer(**parameters)
    with pytest.raises(ValueError, match=message):
        buffer.load_state_dict(filled_buffer().state_dict())
    assert len(buffer) == buffer.draws() == 0


@pytest.mark.parametrize("saved_after", [0, 1, 30, 77])
def test_a_restart_changes_no_bit_though_rows_have_moved_and_scales_were_renewed(saved_after, monkeypatch):
    monkeypatch.setattr(columns, "_MOST_DEAD", 40)

    def run(steps, buffer, drawn):
        for step in steps:
            now = ClockReading(updates=5 * step)
            buffer.add([make_trajectory(rewards=(1.0 + (7 * step + k) % 5,)) for k in range(9)], now)
            buffer.update_priorities(buffer.ids()[::7], np.arange(len(buffer.ids()[::7])))
            draw = buffer.sample(8, now, beta=0.4)
            drawn.append([getattr(draw, name).tobytes() for name in ("ids", "probabilities", "weights", "ages")])

    def new():
        return make_buffer(capacity=50, decay=ExponentialDecay(tau=3), alpha=0.6, eviction="lowest")

    whole, broken, first, second = [], [], new(), new()
    run(range(120), new(), whole)
    run(range(saved_after), first, broken)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    run(range(saved_after, 120), second, broken)
    assert whole == broken


@pytest.mark.parametrize("again", [lambda state: state, saved_and_loaded], ids=["direct", "through a file"])
@pytest.mark.parametrize("eviction", ["lowest", "fifo"])
def test_each_id_is_found_by_itself_after_a_restart_though_others_between_have_gone(eviction, again):
    buffer, restored = (make_buffer(capacity=4, eviction=eviction) for _ in range(2))
    buffer.add(of_rewards(1, 5, 1.5, 6), START)
    buffer.pin([1])
    buffer.add(of_rewards(9, 9), START)
    restored.load_state_dict(again(buffer.state_dict()))
    for key in buffer.ids().tolist():
        assert_same(restored.get([key])[0], buffer.get([key])[0])
        assert restored.update_priorities([key], [3.0]) == restored.observe([key], [-1.0], START) == 0
        restored.pin([key])
    assert restored.pinned().tolist() == buffer.ids().tolist()


def test_looking_does_not_change_what_comes():
    plain, watched = (make_buffer(capacity=50, decay=ExponentialDecay(tau=3), alpha=0.6) for _ in range(2))
    for step in range(60):
        now = ClockReading(updates=5 * step)
        for buffer in (plain, watched):
            buffer.add(of_rewards(*range(1, step % 7 + 2)), now)
            if buffer is watched:
                buffer.probabilities(now), buffer.state_dict(), buffer.nbytes
        assert_same_draw(plain.sample(4, now, beta=0.4), watched.sample(4, now, beta=0.4))


def changed(part, name, change):
    def damage(state):
        owner = state if part is None else state[part]
        owner[name] = change(owner[name])

    return damage


def dropped(part, name):
    return lambda state: (state if part is None else state[part]).pop(name)


def at(index, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


PARTS = ("next_id", "evicted", "draws", "rates", "columns", "end", "checksum", "trajectories")
COLUMNS = ("ids", "groups", "log_base", "log_fresh", "since", "added", "draws", "pinned", "rows")
PACKED = ("blocks", "sizes", "images", "image_sizes", "image_names")
DAMAGES = {
    **{f"no {name}": dropped(None, name) for name in PARTS},
    **{f"no {name}": dropped("columns", name) for name in COLUMNS},
    **{f"no {name}": dropped("trajectories", name) for name in PACKED},
    **{f"short {name}": changed("columns", name, lambda tensor: tensor[:-1]) for name in COLUMNS},
    **{f"short {name}": changed("trajectories", name, lambda tensor: tensor[:-8]) for name in PACKED},
    **{f"empty {name}": changed("trajectories", name, lambda tensor: tensor[:0]) for name in PACKED},
    **{f"half of {name}": changed("columns", name, lambda tensor: tensor.to(torch.uint8)) for name in COLUMNS},
    **{f"bfloat16 {name}": changed("columns", name, lambda tensor: tensor.bfloat16()) for name in COLUMNS},
    "an id twice": changed("columns", "ids", at(3, 12)),
    "an id never given": changed(None, "next_id", lambda number: number - 1),
    "draws that are no number": changed(None, "draws", lambda number: None),
    "a row behind the end": changed(None, "end", lambda number: number - 1),
    "a base that is no number": changed("columns", "log_base", at(0, float("nan"))),
    "an infinite base": changed("columns", "log_base", at(0, float("inf"))),
    "fresher than fresh": changed("columns", "log_fresh", at(0, 0.1)),
    "drawn less than never": changed("columns", "draws", at(0, -1)),
    "younger than it is": changed("columns", "since", at(0, -1.0)),
    "since never": changed("columns", "since", at(0, float("nan"))),
    "not in order": changed("columns", "added", at(0, 1e6)),
    "an infinite scale": changed(None, "scale", lambda scale: [float("inf"), *scale[1:]]),
    "half a scale": changed(None, "scale", lambda scale: scale[:2]),
    "a block cut in two": changed(
        "trajectories", "sizes", lambda sizes: torch.cat([sizes[:1] - 8, sizes[1:2] + 8, sizes[2:]])
    ),
    "a length of its own": changed("trajectories", "blocks", at(slice(0, 400), 127)),
    "another image": changed("trajectories", "image_names", at(0, 0)),
    "an image of another length": changed("trajectories", "images", at(0, 200)),
    "rates without counts": lambda state: state["rates"].pop("counts"),
    "rates of no task": lambda state: state["rates"].update(tasks=[]),
    "more successes than trials": lambda state: state["rates"]["counts"].fill_(-1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_changes(damage):
    source = filled_buffer(priority=Learnability())
    state = saved_and_loaded(source.state_dict())
    DAMAGES[damage](state)
    buffer = filled_buffer(priority=Learnability(), seed=3)
    before = buffer.state_dict()
    # Each is noticed for what it is, and would be if the checksum were made to fit.
    for use in (buffer.load_state_dict, lambda state: reshard([state], 2)):
        with pytest.raises(ValueError, match=r"the saved replay buffer is damaged: (?!checksum is \d)"):
            use(state)
    assert_equal_states(before, buffer.state_dict())


@pytest.mark.parametrize("use", [lambda state: make_buffer().load_state_dict(state), lambda state: reshard([state], 1)])
def test_what_is_no_state_of_a_buffer_is_refused(use):
    with pytest.raises(ValueError, match=r"format_version of the saved replay buffer must be 5, not None"):
        use({})
    with pytest.raises(ValueError, match=r"format_version of the saved replay buffer must be 5, not 3"):
        use(make_buffer().state_dict() | {"format_version": 3})
    with pytest.raises(ValueError, match="the state of a replay buffer must be a dict, not list"):
        use([])


@pytest.mark.parametrize("part", ["blocks", "images", "image_names", "log_base", "groups"])
def test_any_bit_that_has_flipped_is_noticed(part):
    state = filled_buffer(priority=Learnability()).state_dict()
    tensors = state["columns" if part in COLUMNS else "trajectories"]
    raw = tensors[part].numpy().view(np.uint8)
    for byte in np.random.default_rng(0).integers(0, len(raw), 40).tolist():
        raw[byte] ^= 1 << byte % 8
        with pytest.raises(ValueError, match="the saved replay buffer is damaged: "):
            make_buffer(priority=Learnability()).load_state_dict(state)
        raw[byte] ^= 1 << byte % 8
    make_buffer(priority=Learnability()).load_state_dict(state)


@pytest.mark.parametrize("turns", [(1, 2**30), (0, 2), (1, 1), (2, 1), (1, 2), (-(2**31), -(2**31) + 2)])
def test_turns_that_cannot_be_are_refused_before_anything_is_made_of_them(turns):
    buffer = make_buffer()
    buffer.add([make_trajectory(), make_trajectory((1.0, 2.0))], START)
    state = buffer.state_dict()
    numbers = state["trajectories"]["blocks"].numpy()[: int(state["trajectories"]["sizes"][0])].view(np.int32)
    (at,) = (at for at in range(len(numbers) - 4) if numbers[at : at + 5].tolist() == [0, 1, 2, 1, 3])
    numbers[at + 3 : at + 5] = turns
    state["checksum"] = checksum(state["columns"], state["trajectories"])
    with pytest.raises(ValueError, match="blocks have impossible turns, 1 of 2"):
        make_buffer().load_state_dict(state)


@given(st.lists(trajectories(), max_size=5))
def test_the_turns_of_every_trajectory_can_be(items):
    blocks = encode(items, [[] for _ in items])
    sizes = np.array([len(block) for block in blocks], np.int64)
    assert possible_turns(np.frombuffer(b"".join(blocks), np.uint8), sizes).tolist() == [True] * len(items)


def assert_equal_states(one, other):
    if isinstance(one, torch.Tensor):
        assert _same_bytes(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_states(one[key], other[key])
    else:
        assert one == other
