import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.envs.search import MAX_QUERY, Move, SearchQuestion, parse_reply
from freshper_lightning.policy.tiny import byte_tokenizer
from freshper_lightning.rollout.conversation import ChatFormat
from tests.envs.moon import ANSWER, INJECTION, answer, moon_files, search, started


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return moon_files(tmp_path_factory.mktemp("search"))


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("<search>moon landing</search>", Move("search", "moon landing")),
        ("<answer> December\n1972 </answer>", Move("answer", "December\n1972")),
        ("<think>Hm.</think><answer>1972</answer>", Move("answer", "1972")),
        ("I think so: <think></think> then <search>x</search> please", Move("search", "x")),
        ("so it is 1972.</think>\n<answer>1972</answer>", Move("answer", "1972")),
        ("<think>Let me see.</think>", Move("think")),
        ("<answer>1 < 2 > 0</answer>", Move("answer", "1 < 2 > 0")),
        ("<answer><b>1972</b></answer>", Move("answer", "<b>1972</b>")),
        ("<answer>月</answer>", Move("answer", "月")),
        ("", None),
        ("1972", None),
        ("<answer></answer>", None),
        ("<answer> \n </answer>", None),
        ("<search></search>", None),
        ("<answer>1972", None),
        ("1972</answer>", None),
        ("</answer>1972<answer>", None),
        ("<answer>1972</search>", None),
        ("<answer>1972</answer", None),
        ("<answer>1972</answer><answer", None),
        ("search><answer>1972</answer>", None),
        ("<answer>19<think72</answer>", None),
        ("<Answer>1972</Answer>", None),
        ("< answer>1972</ answer>", None),
        ("<answer>1972</answer><answer>1972</answer>", None),
        ("<answer>1969</answer> or <answer>1972</answer>", None),
        ("<search>moon</search><answer>1972</answer>", None),
        ("<answer>1972</answer><search>moon</search>", None),
        ("<search>moon</search><search>mars</search>", None),
        ("<answer><answer>1972</answer></answer>", None),
        ("<answer><search>moon</search></answer>", None),
        ("<think><answer>1972</answer></think>", None),
        ("<think>hm<answer>1972</answer>", None),
        ("<answer>1972</answer><think>hm</think>", None),
        ("<think>a</think><think>b</think><answer>1972</answer>", None),
        ("<information>1972</information>", None),
        ("<search>moon</search><information>1972</information><answer>1972</answer>", None),
        ("<answer>1972</answer></information>", None),
    ],
)
def test_a_reply_is_one_move_or_none(reply, move):
    assert parse_reply(reply) == move


@given(st.text())
def test_any_reply_can_be_parsed_and_a_move_says_something(reply):
    assert parse_reply(reply) is None
    assert parse_reply(f"<answer>{reply}x</answer>") == Move("answer", f"{reply}x".strip())


def test_what_a_page_says_is_neither_a_tag_nor_a_special_token(files):
    observation = started(files).step(search("grey"))[0]
    inside = observation.removeprefix("<information>\n").partition("\n</information>")[0]
    assert "December 1972" in inside
    assert "It is grey, ‹ and › count." in inside
    assert not set(inside) & set("<>")
    assert parse_reply(inside) is None


def test_what_a_page_says_opens_no_turn_in_the_conversation(files):
    chat = ChatFormat(byte_tokenizer())
    ids = chat.increment_ids(started(files).step(search("grey"))[0], ended=False)
    assert ids.count(chat.end_token_id) == 2  # of the reply and of this user turn


ODD = ("\x00", "\ud800", "\u202e", "💥", "é" * 3, "\n", " ", "<", ">", "</", "&lt;", "<|im_end|>", "０", "܀", "\ufffd")
HALVES = (
    "<answer",
    "answer>",
    "</answer>",
    "<answer>",
    "<search>",
    "</search>",
    "<think>",
    "</think>",
    "<information>",
)


RIGHT = answer()
MALFORMED = (
    lambda rng, noise: "",
    lambda rng, noise: noise + ANSWER,
    lambda rng, noise: RIGHT[: rng.randrange(len(RIGHT))] + "." + noise,
    lambda rng, noise: RIGHT[rng.randrange(1, len(RIGHT)) :],
    lambda rng, noise: RIGHT + noise + RIGHT,
    lambda rng, noise: RIGHT + search(noise + "moon"),
    lambda rng, noise: search("moon") + noise + RIGHT,
    lambda rng, noise: RIGHT + noise + rng.choice(HALVES),
    lambda rng, noise: rng.choice([half for half in HALVES if half != "</think>"]) + RIGHT,
    lambda rng, noise: f"<think>{RIGHT}</think>{noise}",
    lambda rng, noise: f"<information>{ANSWER}</information>{RIGHT}",
    lambda rng, noise: noise + INJECTION,
    lambda rng, noise: answer(INJECTION),
    lambda rng, noise: answer("".join(rng.choices(" \n\x00\u202e.!?。", k=5))),
    lambda rng, noise: answer(f"{ANSWER}, {noise}no"),
    lambda rng, noise: RIGHT.replace("<", "＜"),
    lambda rng, noise: RIGHT.upper(),
    lambda rng, noise: ("moon " * 5_000 + RIGHT)[: 25_000 + rng.randrange(20)],
    lambda rng, noise: answer(ANSWER + " x" * 1_000),
    lambda rng, noise: "<answer>" * 1_000 + ANSWER + "</answer>" * 1_000,
)
"""Every kind of the list that the environment promises, each around the right answer."""


def test_ten_thousand_malformed_replies_neither_raise_nor_score(files):
    rng = random.Random(0)
    env = SearchQuestion(**files, max_turns=3)
    ended = True
    for number in range(10_000):
        if ended:
            env.reset(seed=number)
        noise = "".join(rng.choices([*ODD, *string.ascii_letters], k=rng.randrange(12)))
        reply = MALFORMED[number % len(MALFORMED)](rng, noise)
        observation, reward, terminated, truncated, info = env.step(reply)
        assert reward == 0 and info["success"] is False, reply[:300]  # noqa: PT018
        assert isinstance(observation, str)
        ended = terminated or truncated


@given(st.text(max_size=2 * MAX_QUERY))
def test_any_query_is_searched(files, query):
    observation, reward, *_ = started(files).step(search(f"x{query}"))
    assert reward == 0
    assert observation.startswith("<information>\n") or parse_reply(search(f"x{query}")) is None
