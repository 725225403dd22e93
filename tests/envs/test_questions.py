"""How questions and numbers are read and known again."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.envs.questions import final_answer, identity, read_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        (" 18.00 ", "18"),
        ("$1,234.50", "1234.5"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        ("+7.", "7"),
        ("50%", "50"),
        ("50 %", "50"),
        (".5", "0.5"),
        ("-0", "0"),
        ("1,000,000", "1000000"),
    ],
)
def test_signs_of_currency_percent_and_thousands_do_not_change_a_number(text, value):
    assert read_number(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "$",
        "-",
        "%",
        "1,00",
        "1,0000",
        "1 2",
        "12 apples",
        "1/2",
        "1e3",
        "--1",
        "-$-1",
        "x = 3",
        "٣",
        "NaN",
        "1\n2",
    ],
)
def test_anything_but_one_number_is_none(text):
    assert read_number(text) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_every_number_is_read_however_it_is_written(value):
    written = (f"{value:f}", f"{value:,}", f"${value:,}", f"{value:f}00", f"  {value:f}%.")
    assert {read_number(text) for text in written} == {value}


@pytest.mark.parametrize(
    "other",
    [
        "Le Cafe\u0301 n'ouvre pas - 2x?",
        "le Café n’ouvre pas – 2x?",
        "Le  Café n\u200b'ouvre\u00a0pas - 2x?\ufeff",
        "Le Ca\u00adfé n'ouvre pas − ２x?",
    ],
)
def test_a_question_is_known_again_however_it_is_encoded(other):
    assert identity("Le Café n'ouvre pas - 2x?") == identity(other)


def test_a_power_is_no_digit():
    assert identity("What is 2⁵?") != identity("What is 25?")
    assert identity("What is 2⁵?") == identity("What is 2^5?")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("9 * 2 = 18\n#### 18", "18"),
        ("So \\boxed{41}, no: $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        (" 1/2 ", "1/2"),
        ("\\boxed{1", "1"),
        ("#### ", ""),
    ],
)
def test_the_final_answer_of_a_solution(solution, answer):
    assert final_answer(solution) == answer
