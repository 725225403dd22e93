import string

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torchmetrics.text import SQuAD

from freshper_lightning.envs.answers import AnswerScores, exact_match, normalize, token_f1

PAGE = "Neil Armstrong. The last time anyone walked on the moon was in December 1972, during Apollo 17. " * 20
"""Holds the answer, and is not one."""

WORDS = st.lists(st.sampled_from(["a", "an", "the", "An", "red", "Moon", "moon.", "o'clock", "1972", "-"]), max_size=8)


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        ("December 1972", ["14 December 1972 UTC", "December 1972"], True),
        ("december 1972.", ["December 1972"], True),
        ("  December\n\t1972 ", ["December 1972"], True),
        ("the Beatles", ["Beatles"], True),
        ("Beatles, The", ["The Beatles"], True),
        ("An apple a day", ["apple day"], True),
        ("theatre", ["atre"], False),
        (PAGE, ["December 1972"], False),
        ("in December 1972", ["December 1972"], False),
        ("December", ["December 1972"], False),
        ("1972", ["December 1972"], False),
        ("a", ["December 1972"], False),
        ("a", ["The"], False),
        ("the", ["A"], False),
        ("A", ["a"], True),
        ("type A", ["A"], False),
        ("The The", ["The The"], True),
        ("the", ["The The"], False),
        ("", ["a"], False),
        ("", [""], False),
        ("?!", ["!!!"], False),
        ("“The  Moon”…", ["moon"], True),
        ("rock ’n’ roll", ["rock 'n' roll"], True),
        ("1914–1918", ["1914-1918"], True),
        ("Beyonce\u0301", ["Beyonc\u00e9"], True),
        ("Beyonce", ["Beyoncé"], False),
        ("1,000", ["1000"], True),
        ("1.5", ["15"], True),  # as SQuAD has it: points are punctuation
        ("10 000", ["10000"], False),
        ("one", ["1"], False),
        ("December\u00a01972", ["December 1972"], True),
        ("Ⅳ", ["IV"], False),
        ("ΑΒ", ["AB"], False),
        ("December 1972 or 1969", ["December 1972"], False),
    ],
)
def test_an_answer_is_right_where_it_equals_an_accepted_one_after_normalisation(answer, accepted, right):
    assert exact_match(answer, accepted) is right


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_both_scores_are_those_of_squad_wherever_a_word_is_left(answer, accepted):
    answer, accepted = " ".join(answer), [" ".join(words) for words in accepted]
    articles = {"a", "an", "the"}
    assume(all(set(normalize(text).split()) - articles for text in (answer, *accepted)))
    squad = SQuAD()
    squad.update(
        [{"prediction_text": answer, "id": "1"}],
        [{"answers": {"text": accepted, "answer_start": [0] * len(accepted)}, "id": "1"}],
    )
    expected = squad.compute()
    assert 100 * exact_match(answer, accepted) == expected["exact_match"]
    assert 100 * token_f1(answer, accepted) == pytest.approx(float(expected["f1"]), abs=1e-4)


def test_where_squad_counts_a_bare_article_as_right_we_do_not():
    squad = SQuAD()
    squad.update(
        [{"prediction_text": "the", "id": "1"}], [{"answers": {"text": ["A"], "answer_start": [0]}, "id": "1"}]
    )
    assert squad.compute()["exact_match"] == 100
    assert not exact_match("the", ["A"])


@given(st.text())
@example("C:\u0327")
def test_normalising_twice_changes_nothing_and_a_match_has_f1_of_one(text):
    assert normalize(normalize(text)) == normalize(text)
    assert exact_match(text, [text]) is bool(normalize(text))
    assert token_f1(text, [text]) == float(bool(normalize(text)))


@given(st.text(alphabet=string.punctuation + "«»„“”‚‘’—–…¿¡、。 \n"))
def test_punctuation_alone_is_no_answer(text):
    assert normalize(text) == ""
    assert not exact_match(text, [text, "a", "!"])


@pytest.mark.parametrize(
    ("answer", "accepted", "f1"),
    [
        ("in December 1972", ["1969", "December 1972"], 0.8),
        ("red red", ["red"], 2 / 3),
        ("the a an", ["moon"], 0.0),
        ("", ["moon"], 0.0),
        ("moon", [], 0.0),
    ],
)
def test_f1_is_that_of_the_nearest_accepted_answer(answer, accepted, f1):
    assert token_f1(answer, accepted) == pytest.approx(f1)


def test_the_metric_is_the_mean_over_questions_and_is_merged_over_ranks():
    one, two = AnswerScores(), AnswerScores()
    one.update("December 1972", ["december 1972"])
    one.update("in December 1972", ["December 1972"])
    two.update("", ["moon"])
    two.merge_state(one)
    assert {name: float(value) for name, value in two.compute().items()} == pytest.approx(
        {"exact_match": 1 / 3, "token_f1": 0.6}
    )
