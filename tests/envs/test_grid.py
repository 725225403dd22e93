import random

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.envs import cliff_walking, frozen_lake, sokoban
from freshper_lightning.envs.cliff_walking import CliffWalking
from freshper_lightning.envs.frames import TILE, Picture, draw_cell
from freshper_lightning.envs.frozen_lake import FrozenLake
from freshper_lightning.envs.grid import ACTIONS, MOVES
from freshper_lightning.envs.protocol import make_text_env, parse_answer
from freshper_lightning.envs.sokoban import Sokoban
from freshper_lightning.policy.tiny import train_tokenizer
from freshper_lightning.rollout.seeds import demonstration_instance_seed, evaluation_instance_seed
from tests.envs.grids import TASKS, answer, board

MODULES = {FrozenLake: frozen_lake, Sokoban: sokoban, CliffWalking: cliff_walking}
PIECES = [
    *("<answer>", "</answer>", "<answer", "answer>", "</answer", "<ANSWER>", "<search>", "<think>", "</think>"),
    *("Left", "left!", "Leſt", "Ｌｅｆｔ", "Down", "Up Up", "Right,Left", "moves", "10", "√", "P _ O", "<|im_end|>"),
    *("\x00", "\ud7ff", "\u202e", "\u200b", "é" * 50, "🧊", "\n", " ", "\t", "𝕌𝕡", "x" * 10_000, "(?:", "\\", "{}"),
]


def malformed(seed):
    """A reply without an answer, with several, or with one that is no action."""
    rng = random.Random(seed)
    while True:
        reply = "".join(rng.choices(PIECES, k=rng.randrange(8)))
        _, _, rest = reply.partition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        if (
            reply.count("<answer>") != 1
            or not closed
            or inside.strip().casefold() not in {action.casefold() for action in ACTIONS}
        ):
            return reply


@pytest.fixture(params=TASKS, scope="module")
def task(request):
    return TASKS[request.param]


@pytest.fixture(scope="module")
def kwargs(task):
    return task[1]


@pytest.fixture(scope="module")
def env(task):
    return make_text_env(*task).unwrapped


def test_ten_thousand_malformed_replies_name_no_action():
    assert all(parse_answer(malformed(seed), ACTIONS) is None for seed in range(10_000))


@given(st.text(max_size=40), st.sampled_from(["{}", "<answer>{}", "<answer>{}</answer>", "<answer>x{}</answer>"]))
@settings(max_examples=300, deadline=None)
def test_text_names_an_action_only_where_it_is_one(text, frame):
    named = parse_answer(frame.format(text), ACTIONS)
    inside = frame.format(text).partition("<answer>")[2].partition("</answer>")[0].strip()
    assert named is None or named.casefold() == inside.casefold()


def test_malformed_replies_neither_raise_nor_score_nor_change_the_map(env):
    env.reset(seed=4)
    before, worst = env.rows(), 0.0
    for seed in range(10_000):
        if env.over:
            env.reset(seed=4)
        observation, reward, terminated, _, info = env.step(malformed(seed))
        worst = max(worst, reward)
        assert env.rows() == before
        assert not terminated
        assert info == {"valid": False, "effective": False, "success": False}
        assert observation in env.observation_space
    assert worst <= 0.0


def test_an_instance_is_determined_by_its_seed_whatever_was_played_before(env, kwargs):
    first = [env.reset(seed=seed)[0] for seed in range(20)]
    env.step(answer("Up"))
    assert [type(env)(**kwargs).reset(seed=seed)[0] for seed in range(20)] == first
    assert [env.reset(seed=seed)[0] for seed in range(20)] == first


def test_an_episode_is_determined_by_its_seed_and_its_replies(env):
    def played():
        env.reset(seed=12)
        rng = random.Random(3)
        steps = []
        while not env.over:
            steps.append(env.step(answer(rng.choice(ACTIONS))))
        return steps

    assert played() == played()


def test_without_a_seed_a_new_instance_is_drawn_from_the_stream_of_the_last_one(env):
    drawn = [env.reset(seed=1)[0], *(env.reset()[0] for _ in range(5))]
    assert [env.reset(seed=1)[0], *(env.reset()[0] for _ in range(5))] == drawn
    assert len(set(drawn)) > 1 or isinstance(env, CliffWalking)


def test_the_instruction_is_the_same_for_every_instance_and_comes_once(env):
    for seed in range(10):
        assert env.reset(seed=seed)[0].startswith(env.instruction() + "\n")
        assert not env.step("pass")[0].startswith(env.instruction())


def test_the_last_turn_truncates_and_what_follows_is_refused(env):
    env.reset(seed=0)
    ends = [env.step("pass")[2:4] for _ in range(env.max_turns)]
    assert ends == [(False, False)] * (env.max_turns - 1) + [(False, True)]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("pass")


def test_everything_said_lies_in_the_declared_spaces(env, kwargs):
    for seed in range(10):
        for observation, reply in MODULES[type(env)].demonstrate(seed, 0.9, **kwargs):
            assert observation in env.observation_space
            assert reply in env.action_space


def test_demonstrations_are_determined_by_their_seed_and_refuse_impossible_noise(env, kwargs):
    demonstrate = MODULES[type(env)].demonstrate
    assert demonstrate(7, 0.5, **kwargs) == demonstrate(7, 0.5, **kwargs)
    with pytest.raises(ValueError, match=r"noise.*1.2"):
        demonstrate(7, 1.2, **kwargs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", [None, "ansi", "rgb_array"])
def test_gymnasium_accepts_the_registered_environment(task, mode):
    env_id, kwargs = task
    env = make_text_env(env_id, {**kwargs, "render_mode": mode})
    check_env(env.unwrapped, skip_render_check=mode != "rgb_array")
    env.reset(seed=0)
    np.testing.assert_array_equal(env.render(), env.unwrapped.render())


def test_a_frame_has_a_tile_per_cell_and_equal_cells_look_equal_and_others_do_not(env):
    tiles = {}
    for seed in range(10):
        observation = env.reset(seed=seed)[0]
        env.render_mode = "rgb_array"
        frame, cells = env.render(), board(observation)
        env.render_mode = None
        assert frame.shape == (TILE * len(cells), TILE * len(cells[0]), 3)
        assert frame.dtype == np.uint8
        for row, line in enumerate(cells):
            for column, symbol in enumerate(line):
                tile = frame[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
                np.testing.assert_array_equal(tile, tiles.setdefault(symbol, tile))
    assert len({tile.tobytes() for tile in tiles.values()}) == len(tiles) >= 3


def test_every_symbol_has_a_picture_of_its_own(env):
    assert len({draw_cell(picture).tobytes() for picture in env.pictures.values()}) == len(env.pictures)


def test_a_cell_is_its_ground_with_a_darker_edge():
    cell = draw_cell(Picture((200, 100, 40)))
    assert (cell[:-1, :-1] == (200, 100, 40)).all()
    assert (cell[-1] < cell[0, 0]).all()
    assert (cell[:, -1] < cell[0, 0]).all()


@pytest.mark.parametrize("made", MODULES)
def test_arguments_that_every_game_has_are_refused_by_name(made):
    with pytest.raises(ValueError, match=r"max_.*0"):
        made(max_turns=0)
    with pytest.raises(ValueError, match=r"render_mode.*ansi, rgb_array.*'human'"):
        made(render_mode="human")


@pytest.mark.parametrize(("name", "most"), [("sokoban_simple", 704), ("cliff_walking", 2688), ("sokoban_hard", 6144)])
def test_a_tiny_tokenizer_keeps_cells_and_actions_whole_and_an_episode_fits_its_bound(name, most):
    env_id, kwargs = TASKS[name]
    env = make_text_env(env_id, kwargs).unwrapped
    module = MODULES[type(env)]
    tokenizer = train_tokenizer(module.corpus(60, seed=10**6), 512, module.ISOLATE)
    messages = [{"role": "user", "content": env.reset(seed=0)[0]}]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(env.step("pass")[0], add_special_tokens=False))
    assert sum(piece.lstrip("ĠĊ") in {*"P_OGXSC#", "âĪļ"} for piece in pieces) == sum(map(len, env.rows()))
    assert {*ACTIONS} <= {*tokenizer.get_vocab()}
    while not env.over:
        messages += [{"role": "assistant", "content": answer(ACTIONS[env.turns_left % 4])}]
        messages += [{"role": "user", "content": env.step("pass")[0]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert 0.8 * most < len(tokenizer.encode(text, add_special_tokens=False)) <= most


def test_opposite_moves_are_two_apart():
    for number, action in enumerate(ACTIONS):
        opposite = ACTIONS[(number + 2) % len(ACTIONS)]
        assert MOVES[opposite] == (-MOVES[action][0], -MOVES[action][1])


@pytest.mark.parametrize("name", ["frozen_lake", "slippery", "sokoban_simple"])
def test_no_position_of_a_demonstration_is_one_that_a_held_out_instance_starts_from(name):
    env = make_text_env(*TASKS[name]).unwrapped
    played = {
        str(board(observation))
        for episode in range(1500)
        for observation, _ in MODULES[type(env)].demonstrate(
            demonstration_instance_seed(0, episode), 0.4, **TASKS[name][1]
        )
    }
    held_out = {str(board(env.reset(seed=evaluation_instance_seed(0, index))[0])) for index in range(512)}
    assert len(held_out) > 480
    assert not held_out & played
