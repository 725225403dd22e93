import itertools
import re
from collections import Counter

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.envs import frozen_lake
from freshper_lightning.envs.frozen_lake import ISOLATE, FrozenLake, Lake, corpus, demonstrate, draw_lake
from freshper_lightning.envs.grid import ACTIONS, MOVES
from freshper_lightning.policy.tiny import train_tokenizer
from freshper_lightning.rollout.seeds import (
    demonstration_instance_seed,
    evaluation_instance_seed,
    training_instance_seed,
)
from tests.envs.grids import answer, board

SEEDS = range(1000)
VOCABULARY = 448


def find(rows, symbol):
    return [(r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell == symbol]


def placed(player, goal=(0, 2), holes=(), size=3, **kwargs):
    """An environment in a chosen state."""
    env = FrozenLake(size=size, **kwargs)
    env.reset(seed=0)
    env.lake, env.player = Lake(size, frozenset(holes), player, goal), player
    return env


def reachable(rows):
    """Independent of the product: grow the set of visited cells until nothing changes."""
    open_cells = set(find(rows, "P")) | set(find(rows, "_")) | set(find(rows, "G"))
    seen = set(find(rows, "P"))
    while True:
        grown = seen | {(r + dr, c + dc) for r, c in seen for dr, dc in MOVES.values()} & open_cells
        if grown == seen:
            return set(find(rows, "G")) <= seen
        seen = grown


def succeeds(seed, noise, **kwargs):
    env = FrozenLake(**kwargs)
    env.reset(seed=seed)
    return [env.step(reply)[4]["success"] for _, reply in demonstrate(seed, noise, **kwargs)][-1]


def test_start_and_goal_are_distinct_and_the_goal_is_reachable_for_every_seed():
    env = FrozenLake()
    for seed in SEEDS:
        rows = board(env.reset(seed=seed)[0])
        assert [len(row) for row in rows] == [4] * 4
        assert len(find(rows, "P")) == len(find(rows, "G")) == 1
        assert reachable(rows)


@given(st.integers(2, 7), st.floats(0, 1), st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_every_size_and_hole_rate_gives_a_solvable_map_that_its_seed_determines(size, hole_probability, seed):
    env = FrozenLake(size=size, hole_probability=hole_probability)
    observation, _ = env.reset(seed=seed)
    assert reachable(board(observation))
    assert FrozenLake(size=size, hole_probability=hole_probability).reset(seed=seed)[0] == observation


def test_start_and_goal_are_uniform_and_cells_are_holes_at_the_asked_rate():
    lakes = [draw_lake(4, 0.2, np.random.default_rng(seed)) for seed in range(4000)]
    for cells in (Counter(lake.start for lake in lakes), Counter(lake.goal for lake in lakes)):
        assert len(cells) == 16
        # conditioning on reachability prefers cells with more neighbours a little
        assert all(0.045 < count / len(lakes) < 0.08 for count in cells.values())
    rate = np.mean([len(lake.holes) for lake in lakes]) / 14
    assert 0.15 < rate < 0.2


def test_without_holes_there_are_none_and_rates_of_one_leave_only_start_and_goal():
    rng = np.random.default_rng(0)
    assert not draw_lake(4, 0.0, rng).holes
    assert len(draw_lake(4, 1.0, rng).holes) == 14


@pytest.mark.parametrize("action", ACTIONS)
def test_a_move_goes_one_cell_its_way_and_stops_at_the_edge(action):
    env = placed(player=(1, 1), goal=(0, 0))
    env.step(answer(action))
    moved = (1 + MOVES[action][0], 1 + MOVES[action][1])
    assert env.player == moved
    _, _, _, _, info = env.step(answer(action))
    assert env.player == moved
    assert info == {"valid": True, "effective": False, "success": False}


def test_the_goal_gives_one_and_ends_the_episode():
    env = placed(player=(0, 1))
    observation, reward, terminated, truncated, info = env.step("On it! <answer>right</answer>")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert env.render().splitlines()[0] == "_ _ √"
    assert observation.startswith("Reward: 1\n")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(answer("Left"))


def test_a_hole_gives_nothing_and_ends_the_episode():
    env = placed(player=(0, 1), holes=[(0, 0)])
    _, reward, terminated, truncated, info = env.step(answer("Left"))
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    assert env.render().splitlines()[0] == "X _ G"


@pytest.mark.parametrize("reply", ["", "Left", "<answer>Stay</answer>", "<answer>Left", "<answer>Left, Up</answer>"])
def test_an_invalid_reply_costs_the_turn_and_changes_nothing(reply):
    env = placed(player=(1, 1))
    before = env.render()
    observation, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid": False, "effective": False, "success": False}
    assert env.render() == before
    assert observation.endswith("Turns left: 9")


@pytest.mark.parametrize("max_turns", [1, 10])
def test_the_last_turn_truncates(max_turns):
    env = placed(player=(1, 1), max_turns=max_turns)
    for turn in range(max_turns):
        _, _, terminated, truncated, _ = env.step("pass")
        assert (terminated, truncated) == (False, turn == max_turns - 1)


def test_the_goal_on_the_last_turn_terminates_and_is_not_truncated():
    env = placed(player=(0, 1), max_turns=1)
    _, reward, terminated, truncated, _ = env.step(answer("Right"))
    assert (reward, terminated, truncated) == (1.0, True, False)


def test_slippery_ice_goes_as_intended_or_to_either_side_a_third_of_the_time():
    env, seen = placed(player=(1, 1), slippery=True), Counter()
    for _ in range(3000):
        env.player, env.turns_left = (1, 1), 10
        env.step(answer("Up"))
        seen[env.player] += 1
    assert set(seen) == {(0, 1), (1, 0), (1, 2)}
    assert all(abs(count / 3000 - 1 / 3) < 0.04 for count in seen.values())


def test_slips_are_determined_by_the_seed():
    replies = [answer(action) for action in itertools.islice(itertools.cycle(ACTIONS), 10)]

    def played():
        env = FrozenLake(slippery=True, hole_probability=0.0)
        env.reset(seed=5)
        return [env.step(reply)[0] for reply in replies if not env.over]

    assert played() == played()


@pytest.mark.parametrize("kwargs", [{}, {"size": 6, "max_turns": 25}, {"slippery": True}])
def test_the_instruction_describes_what_is_shown_and_nothing_else(kwargs):
    env = FrozenLake(**kwargs)
    text = env.instruction()
    described = dict(re.findall(r"(\S) is (?:a |the )?(you|ice|hole|goal)", text))
    shown = set()
    for seed in range(50):
        observations = [observation for observation, _ in demonstrate(seed, 0.8, **kwargs)]
        shown |= {cell for observation in observations for row in board(observation) for cell in row}
    assert described == {"P": "you", "_": "ice", "O": "hole", "G": "goal"}
    assert shown == set(described)
    assert f"{env.size} by {env.size}" in text
    assert f"within {env.max_turns} turns" in text
    assert all(action in text for action in ACTIONS)
    assert ("slippery" in text) == env.slippery
    # outside of their own definitions no cell symbol stands alone, so none can be taken for a word
    assert sorted(re.findall(r"(?<!\S)[P_OGX√](?!\S)", text)) == sorted(described)


def test_later_messages_tell_reward_map_and_turns_left():
    env = placed(player=(1, 1), holes=[(2, 2)])
    assert env.step("pass")[0] == "Reward: 0\n_ _ G\n_ P _\n_ _ O\nTurns left: 9"


@pytest.mark.parametrize("kwargs", [{}, {"slippery": True, "size": 9, "max_turns": 12345}])
def test_everything_said_lies_in_the_declared_spaces(kwargs):
    env = FrozenLake(**kwargs)
    for seed in range(30):
        assert env.reset(seed=seed)[0] in env.observation_space
        for _, reply in demonstrate(seed, 0.9, **kwargs):
            assert reply in env.action_space
            if not env.over:
                assert env.step(reply)[0] in env.observation_space


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 1}, "size.*1"),
        ({"hole_probability": 1.5}, "hole_probability.*1.5"),
        ({"max_turns": 0}, "max_turns.*0"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake(**kwargs)


def test_settings_that_give_next_to_no_map_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(frozen_lake, "MAX_DRAWS", 2)
    with pytest.raises(ValueError, match=r"size=40, hole_probability=1: no map of training in 2 draws"):
        FrozenLake(size=40, hole_probability=1)


@given(st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_following_optimal_actions_takes_the_shortest_way(seed):
    env = FrozenLake(max_turns=100)
    env.reset(seed=seed)
    shortest = env.lake.distances()[env.player]
    moves = 0
    while not env.over:
        env.step(answer(env.optimal_action()))
        moves += 1
    assert env.player == env.lake.goal
    assert moves == shortest


def test_demonstrations_succeed_less_the_noisier_they_are():
    rates = [np.mean([succeeds(seed, noise) for seed in range(300)]) for noise in (0.0, 0.4, 0.7, 1.0)]
    assert rates[0] > 0.99
    assert rates == sorted(rates, reverse=True)
    assert 0.05 < rates[-1] < 0.4


def test_demonstrations_on_slippery_ice_play_the_slips_that_the_environment_makes():
    rate = np.mean([succeeds(seed, 0.0, slippery=True) for seed in range(200)])
    assert 0.2 < rate < 0.9


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus(300, seed=10**6), VOCABULARY, ISOLATE)


def test_cells_actions_and_digits_are_single_tokens_wherever_they_stand(tokenizer):
    observation = FrozenLake(hole_probability=0.3).reset(seed=4)[0]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(observation, add_special_tokens=False))
    cells = [piece for piece in pieces if re.fullmatch("[ĠĊ]?[P_OG]", piece)]
    assert len(cells) == 16 + 4  # the map and the legend
    assert all(pieces.count(action) == 1 for action in ACTIONS)
    assert all(len(piece) == 1 for piece in pieces if re.search(r"\d", piece))
    reply = tokenizer.convert_ids_to_tokens(tokenizer.encode(answer("Down"), add_special_tokens=False))
    assert "Down" in reply


def test_a_turn_costs_at_most_40_tokens_and_a_full_episode_at_most_400(tokenizer):
    def length(messages, **kwargs):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        return len(tokenizer.encode(text, add_special_tokens=False))

    for seed in range(500):
        env = FrozenLake()
        messages = [{"role": "user", "content": env.reset(seed=seed)[0]}]
        before = 0
        for turn in range(10):
            messages.append({"role": "assistant", "content": answer(ACTIONS[(seed + turn) % 4])})
            total = length(messages)
            assert turn == 0 or total - before <= 40
            before = total
            # stay where we are, so that every episode has all its turns
            messages.append({"role": "user", "content": env.step("pass")[0]})
        assert total <= 400


def test_training_and_held_out_seeds_never_share_holes_and_goal():
    env = FrozenLake()

    def lakes(seeds):
        found = set()
        for seed in seeds:
            env.reset(seed=seed)
            found.add((env.lake.holes, env.lake.goal))
        return found

    trained = lakes(training_instance_seed(0, iteration, group) for iteration in range(100) for group in range(16))
    demonstrated = lakes(demonstration_instance_seed(0, episode) for episode in range(1000))
    held_out = lakes(evaluation_instance_seed(0, index) for index in range(512))
    assert len(held_out) > 450
    assert not held_out & (trained | demonstrated)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hole_probability", [0.0, 0.2, 1.0])
def test_both_parities_exist_on_small_lakes(size, hole_probability):
    env = FrozenLake(size=size, hole_probability=hole_probability)
    for seed in range(20):
        env.reset(seed=seed)
        assert env.lake.parity() == seed % 2
