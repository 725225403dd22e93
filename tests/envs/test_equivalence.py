"""The grader on hard pairs, through the processes that training uses."""

import pytest

from freshper_lightning.envs.checker import CheckerPool, CheckLimits

RIGHT = [
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", "0.50"),
    (r"\tfrac{3}{4}", r"\dfrac{3}{4}"),
    ("1 1/2", "3/2"),
    ("3/2", "1 1/2"),
    (r"1\frac{1}{2}", "1.5"),
    ("1/3", "0.333333"),
    (r"50\%", "0.5"),
    ("50%", "1/2"),
    ("0.5", "50%"),
    ("50%", "50"),
    ("50", "50%"),
    ("50%", "50 percent"),
    ("1,000", "1000"),
    ("1000", "1,000"),
    ("1000", "1{,}000"),
    ("1000", r"1\,000"),
    ("1000", "1 000"),
    ("1234567", "1,234,567"),
    ("$1,000", r"\$1,000.00"),
    ("1e3", "1000"),
    ("0.000001", "1e-6"),
    ("-3", "−3"),
    ("42", "042"),
    ("42", "42."),
    ("42", "**42**"),
    ("42", "$42$"),
    ("42", r"\boxed{42}"),
    ("42", r"\text{42}"),
    ("42", "x = 42"),
    ("x=5", "5"),
    ("[0,1)", "[0, 1)"),
    ("[0,1)", r"\left[0,1\right)"),
    (r"(-\infty,2]", r"(-\infty, 2]"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("5 cm", "5"),
    ("5", "5 cm"),
    ("5 cm", r"5\text{ cm}"),
    ("12", "12 apples"),
    ("5 m/s", "5"),
    ("90", r"90^\circ"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("2x+2", "2(x+1)"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    ("2^{10}", "1024"),
    ("a", "a"),
    ("B", "b"),
    (r"\text{blue}", "Blue"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
WRONG = [
    ("1/2", "1/3"),
    ("1/3", "0.33"),
    ("50%", "0.05"),
    ("12", "1,2"),
    ("1.2", "1,2"),
    ("1000", "1"),
    ("1000", "1.000"),
    ("42", "-42"),
    ("42", ""),
    ("42", "."),
    ("42", "a"),
    ("a", "42"),
    ("a", "b"),
    ("0", "a"),
    ("3", "three"),
    ("blue", "lube"),
    ("0", "The answer is 0"),
    ("42", "The answer is 42"),
    ("42", "It could be 3 or 42"),
    ("42", "41 or 42"),
    ("42", "42 and 43"),
    ("42", "41, 42"),
    ("42", "41;42"),
    ("42", "42\n43"),
    ("42", "40 2"),
    ("42", "1 2 3 36"),
    ("42", r"\{41,42\}"),
    ("42", r"\boxed{41} \boxed{42}"),
    ("42", "41 = 42"),
    ("42", "[41,43]"),
    ("42", "0<x<100"),
    ("42", r"\ge 42"),
    ("42", r"\pm 42"),
    ("42", "x"),
    ("42", "42x"),
    ("42", r"\text{any number}"),
    ("42", r"42 \text{ or } 43"),
    ("42", r"\frac{0}{0}"),
    ("42", r"\infty"),
    ("42", "nan"),
    ("3", r"x\in\{1,2,3\}"),
    ("[0,1]", "(0,1)"),
    ("[0,1)", "(0,1]"),
    ("(1,2)", "(2,1)"),
    ("5 cm", "5 m"),
    ("5 cm", "5 kg"),
    ("5", "5 million"),
    ("5 million", "5"),
    ("2x", "2"),
    ("2x", "2y"),
    ("x=5", "y=5"),
    ("0", "page " * 40 + "0"),
]


@pytest.fixture(scope="module")
def pool():
    pool = CheckerPool(CheckLimits(check_seconds=60))
    yield pool
    pool.close()


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_an_answer_of_the_same_value_is_right_however_it_is_written(pool, gold, answer):
    assert pool.check(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_an_answer_of_another_value_or_of_several_is_wrong(pool, gold, answer):
    assert not pool.check(gold, answer)
