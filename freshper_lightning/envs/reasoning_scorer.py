"""Whether an answer gets the full score of its task in reasoning-gym, without running it as code.

Several scorers hand the answer to ``eval``, or to sympy, which does the same. Here both refuse what is not arithmetic.
``check_server.py`` loads this file in a process of its own; it imports nothing of this package.
"""

import ast
import random
import re
import sys
from collections.abc import Collection
from decimal import localcontext
from typing import Any

import numpy as np
import sympy
from sympy.parsing import sympy_parser

_sympy_parse = sympy_parser.parse_expr

_FUNCTIONS = (
    *("sqrt", "cbrt", "root", "exp", "log", "ln", "abs", "Abs", "sign", "Rational"),
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "atan2"),
    *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "acoth", "erf", "erfi", "Ei", "Si", "Ci", "li"),
)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.List, ast.Tuple, ast.Load)
_NO_NUMBER = re.compile(r"(?:[\s\d.,+\-()\[\]ij]*nan)+[\s\d.,+\-()\[\]ij]*", re.IGNORECASE)

EXAMPLE: tuple[Any, ...] = ("7", "7", "chain_sum", {}, {"answer": "7"})


class TaskError(Exception):
    """A task cannot be built in this process, which says nothing about an answer."""


def check(gold: str, answer: str, task: str, config: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether the scorer of ``task`` gives ``answer`` to ``entry`` its full score.

    NaN is not right unless it is ``gold``, a word, though a scorer that takes the smaller of 1 and a distance may say
    so. Where ``entry`` is empty, ``gold`` is a seed: whether it has ``answer`` for its question in this process too,
    whose strings have other hashes.

    Raises:
        TaskError: reasoning-gym does not make the task in this process.
    """
    if not entry:
        return _question(task, config, int(gold)) == answer
    if answer != gold and _NO_NUMBER.fullmatch(answer):
        return False
    return bool(_data(task, config).score_answer(answer, entry) >= 1)


def _question(task: str, config: dict[str, Any], seed: int) -> str:
    random.seed(seed)
    np.random.seed(seed)
    try:
        with localcontext():
            return str(reasoning_gym.create_dataset(task, seed=seed, size=1, **config)[0]["question"])
    except Exception as error:
        raise TaskError(f"{error}; a checker's process makes no question of it") from error


def _data(task: str, config: dict[str, Any]) -> Any:
    key = repr((task, config))
    if key not in _DATA:
        try:
            _DATA[key] = reasoning_gym.create_dataset(task, seed=0, size=1, **config)
        except Exception as error:
            raise TaskError(f"{error}; a checker's process knows only the data sets of reasoning-gym itself") from error
    return _DATA[key]


def refuse_code(text: str, functions: Collection[str], constants: tuple[type, ...]) -> None:
    """Do nothing for operators, names, lists, tuples, and what else is allowed.

    Raises:
        SyntaxError: There is anything else in ``text``, such as an attribute or another call.
    """
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        match node:
            case ast.Constant(value=value):
                allowed = isinstance(value, constants)
            case ast.Name(id=name):
                allowed = not name.startswith("_")
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                allowed = name in functions
            case _:
                allowed = isinstance(node, _ARITHMETIC)
        if not allowed:
            raise SyntaxError(f"{type(node).__name__} in {text[:80]!r}")


def _parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
    refuse_code(text, _FUNCTIONS, (int, float))  # sympy would evaluate what is in a string
    return _sympy_parse(text, *args, **kwargs)


def _eval(text: str) -> Any:
    refuse_code(text, (), (int, float, str))
    return eval(text, {"__builtins__": {}})


# Ahead of the import of reasoning-gym, which takes the function from any of the three.
sympy.parse_expr = sympy.parsing.parse_expr = sympy_parser.parse_expr = _parse_expr
import reasoning_gym  # noqa: E402

for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "reasoning_gym":
        vars(_module)["eval"] = _eval

_DATA: dict[str, Any] = {}
