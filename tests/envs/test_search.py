import json
import os
import socket
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from freshper_lightning.envs.answers import AnswerScores
from freshper_lightning.envs.protocol import make_text_env
from freshper_lightning.envs.search import HINT, MAX_QUERY, SearchQuestion
from freshper_lightning.policy.tiny import byte_tokenizer
from freshper_lightning.retrieval import Document, build_index
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.rollout.engine import Completion
from freshper_lightning.rollout.episode import Episode, EpisodeError, EpisodePlan, reset
from tests.envs.moon import PAGES, QUESTION, answer, jsonl, moon_files, search, started

NQ = Path(os.environ.get("NQ_OPEN", Path(__file__).parents[3] / "shared" / "data" / "nq_open_dev_first600.jsonl"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return moon_files(tmp_path_factory.mktemp("search"))


def test_a_right_answer_ends_with_reward_one(files):
    observation, reward, terminated, truncated, info = started(files).step(answer("the december, 1972?"))
    assert (reward, terminated, truncated, observation) == (1.0, True, False, "Reward: 1")
    assert info == {"valid": True, "effective": True, "success": True, "scores": {"token_f1": 1.0}}


@pytest.mark.parametrize(
    ("given_answer", "f1"),
    [("1972", 2 / 3), ("a", 0.0), ("!", 0.0), (PAGES[1], 0.01), ("December 1972 or 1969", 2 / 3)],
)
def test_a_wrong_answer_ends_with_nothing(files, given_answer, f1):
    _, reward, terminated, truncated, info = started(files).step(answer(given_answer))
    assert (reward, terminated, truncated, info["valid"], info["success"]) == (0.0, True, False, True, False)
    assert info["scores"]["token_f1"] == pytest.approx(f1, abs=0.01)


def test_a_search_shows_pages_as_information_and_counts(files):
    env = started(files, top_k=1, document_characters=60)
    observation, reward, terminated, truncated, info = env.step(search("Apollo 17"))
    lines = observation.split("\n")
    assert lines[:2] == ["<information>", "Doc 1: Apollo 17"]
    assert lines[2] == PAGES[1].partition("\n")[2][:60]
    assert lines[3:] == ["</information>", "Searches left: 3", "Replies left: 5"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid": True, "effective": True, "success": False, "scores": {"token_f1": 0.0}}


def test_a_search_without_a_hit_says_so(files):
    assert started(files).step(search("xyzzy"))[0].startswith("<information>\nNothing found.\n</information>\n")


def test_one_search_too_many_ends_with_nothing(files):
    env = started(files, max_searches=2)
    assert [env.step(search())[2] for _ in range(2)] == [False, False]
    observation, reward, terminated, truncated, info = env.step(search())
    assert (observation, reward, terminated, truncated) == ("Reward: 0", 0.0, True, False)
    assert info == {"valid": True, "effective": False, "success": False, "scores": {"token_f1": 0.0}}


def test_an_answer_after_the_last_search_still_counts(files):
    env = started(files, max_searches=1)
    env.step(search())
    assert env.step(answer())[1] == 1.0


def test_a_thought_alone_is_a_valid_turn_without_effect(files):
    observation, reward, terminated, truncated, info = started(files).step("<think>Hm.</think>")
    assert observation == f"{HINT}\nSearches left: 4\nReplies left: 5"
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid": True, "effective": False, "success": False, "scores": {"token_f1": 0.0}}


def test_an_invalid_reply_costs_its_turn_and_nothing_else(files):
    observation, reward, terminated, truncated, info = started(files).step("December 1972")
    assert observation == f"{HINT}\nSearches left: 4\nReplies left: 5"
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid": False, "effective": False, "success": False, "scores": {"token_f1": 0.0}}


@pytest.mark.parametrize("reply", ["", "<think>Hm.</think>", search()])
def test_the_last_reply_truncates(files, reply):
    env = started(files, max_turns=2)
    env.step("")
    _, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated, info["success"], info["scores"]) == (0, False, True, False, {"token_f1": 0})
    assert not info["effective"]


def test_an_answer_in_the_last_reply_counts(files):
    env = started(files, max_turns=1)
    assert env.step(answer())[1:4] == (1.0, True, False)


@pytest.mark.parametrize("last", [answer(), answer("no"), ""])
def test_an_episode_that_is_over_needs_a_reset(files, last):
    env = started(files, max_turns=1)
    env.step(last)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(answer())
    env.reset(seed=0)
    assert env.step(answer())[1] == 1.0


PLAN = EpisodePlan(group=0, member=0, instance_seed=0, sampling_key=(0,))


def begun(env, chat):
    return Episode.start(PLAN, env, reset(env, PLAN), chat, max_context=20_000)


def say(episode, text):
    ids = episode.conversation.chat.reply_ids(text)
    episode.settle(episode.play(episode.take(Completion(0, ids, [-1.0] * len(ids), "stop", 0))))


def test_information_is_not_trained_on(files):
    chat = ChatFormat(byte_tokenizer())
    episode = begun(SearchQuestion(**files), chat)
    say(episode, search("grey"))
    say(episode, answer())
    mask = episode.conversation.sampled_mask()
    sampled = [token for token, kept in zip(episode.conversation.token_ids, mask, strict=True) if kept]
    assert chat.decode(sampled) == search("grey") + answer()
    assert "<information>" in episode.conversation.text()
    assert episode.success
    assert episode.scores == {"token_f1": 1.0}


def test_a_retriever_that_fails_loses_the_episode_instead_of_answering_wrongly(files):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
    env = SearchQuestion(files["questions"], server=nobody, server_options={"attempts": 2, "backoff": 0.01})
    episode = begun(env, ChatFormat(byte_tokenizer()))
    with pytest.raises(EpisodeError, match=rf"RetrievalError: {nobody} failed in 2 attempts"):
        say(episode, search())
    assert not episode.steps


class Listening:
    def __init__(self):
        self.asked = []

    def search(self, query, top_k):
        self.asked.append((query, top_k))
        return [Document("Title\nText")]


def test_a_query_is_cut_and_made_unicode(files):
    env = started(files, top_k=2)
    env.retriever = Listening()
    env.step(search("\ud800" + "m" * 10_000))
    assert env.retriever.asked == [("?" + "m" * (MAX_QUERY - 1), 2)]


def test_the_seed_alone_chooses_the_question_and_equal_replies_give_equal_episodes(files, tmp_path):
    rows = [{"question": f"question {number}?", "answer": str(number)} for number in range(20)]
    path = {"questions": jsonl(tmp_path / "twenty.jsonl", rows), "index": files["index"]}
    one, two = SearchQuestion(**path), SearchQuestion(**path)
    drawn = []
    for seed in range(200):
        two.reset(seed=seed + 1)
        assert one.reset(seed=seed) == two.reset(seed=seed)
        drawn.append(one.question.text)
        assert [one.step(search()), one.step("")] == [two.step(search()), two.step("")]
    assert len(set(drawn)) == 20


def test_it_is_a_registered_environment_that_speaks_text(files):
    check_env(make_text_env("freshper/SearchQuestion-v0", files).unwrapped, skip_render_check=True)


@pytest.fixture(scope="module")
def nq(tmp_path_factory):
    """The questions of NQ-open, over a page for each of them that mentions its answer."""
    if not NQ.exists():
        pytest.skip(f"the questions of NQ-open are not at {NQ}; NQ_OPEN may name them")
    folder = tmp_path_factory.mktemp("nq")
    rows = [json.loads(line) for line in NQ.read_text(encoding="utf-8").splitlines()]
    pages = [f"{row['question']}\nPerhaps {row['answer'][0]}." for row in rows]
    build_index(jsonl(folder / "corpus.jsonl", [{"contents": page} for page in pages]), folder / "index")
    return SearchQuestion(questions=str(NQ), index=str(folder / "index"))


PUNCTUATION = (("---",), (")",))
"""Answers of two of the questions; nothing that is said equals them."""


def test_every_question_of_nq_open_runs_through_it(nq):
    rows = nq.questions
    scores, wrong = AnswerScores(), AnswerScores()
    for question in rows:
        nq.reset(seed=0)
        nq.question = question
        observation, *_ = nq.step(search(question.text))
        assert observation.startswith("<information>\nDoc 1: ")
        shown = observation.partition("Perhaps ")[2].partition("\n")[0]
        scores.update(question.answers[-1], question.answers)
        for text in ("a", shown + observation):
            wrong.update(text, question.answers)
        assert nq.step(answer(question.answers[-1]))[1] == (question.answers not in PUNCTUATION)
    assert wrong.compute()["exact_match"] == 0
    assert float(scores.compute()["exact_match"]) == pytest.approx(598 / 600)
    assert len(rows) == 600


def test_a_question_without_an_answer_in_words_is_said_and_nobody_answers_it(files, tmp_path, caplog):
    path = jsonl(tmp_path / "dashes.jsonl", [{"question": "how many?", "answer": ["---"]}, QUESTION])
    env = SearchQuestion(questions=path, index=files["index"])
    assert "1 of 2 have no answer with a word in it" in caplog.text
    for reply in ("---", ".", "a", "0"):
        env.reset(seed=0)
        env.question = env.questions[0]
        assert env.step(answer(reply))[1] == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no questions"),
        ([{"question": "?", "result": "1"}], "row 1 has no answer_field='answer'; its fields are question, result"),
        ([{"answer": "1"}], "row 1 has no question_field='question'"),
        ([{"question": " ", "answer": "1"}], "row 1: question must be a text"),
        ([QUESTION, {"question": "?", "answer": 5}], "row 2: answer must be a text or a list of texts, not 5"),
        ([{"question": "?", "answer": []}], "row 1: answer must be a text or a list of texts"),
        ([{"question": "?", "answer": ["x", 5]}], "row 1: answer must be a text or a list of texts"),
    ],
)
def test_questions_that_cannot_serve_are_refused(files, tmp_path, rows, message):
    path = jsonl(tmp_path / "broken.jsonl", rows)
    with pytest.raises(ValueError, match=r"questions=.*broken\.jsonl") as refusal:
        SearchQuestion(questions=path, index=files["index"])
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 0}, "^top_k=0 must be a whole number of at least 1$"),
        ({"top_k": 1.5}, r"^top_k=1\.5 must be a whole number of at least 1$"),
        ({"top_k": True}, "^top_k=True must be a whole number of at least 1$"),
        ({"max_searches": 1.5}, r"^max_searches=1\.5 must be"),
        ({"max_turns": "6"}, "^max_turns='6' must be"),
        ({"document_characters": 10.5}, r"^document_characters=10\.5 must be"),
        ({"questions": "nowhere.jsonl"}, r"questions='nowhere\.jsonl' is not a file"),
        ({"index": "nowhere"}, "index='nowhere' is not an index"),
        ({"index": None}, "exactly one of index and server"),
        ({"server": "http://host"}, "exactly one of index and server"),
        ({"index": None, "server": "host"}, "server='host' must be an address"),
        ({"index": None, "server": "http://h", "server_options": {"speed": 1}}, "allowed: timeout, attempts"),
        ({"index": None, "server": "http://h", "server_options": {"timeout": 0}}, "timeout=0"),
        ({"index": None, "server": "http://h", "server_options": {"attempts": 1.5}}, r"attempts=1\.5 must be a whole"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(files, wrong, message):
    with pytest.raises(ValueError, match=message):
        SearchQuestion(**{**files, **wrong})


def test_a_missing_package_is_named_with_what_to_install(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "urllib3", None)
    with pytest.raises(ValueError, match=r"server='http://lost' needs the package urllib3: pip install .*\[search\]"):
        SearchQuestion(questions=files["questions"], server="http://lost")
