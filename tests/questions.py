"""Arithmetic in words, in the form of GSM8K: a question, and a solution that ends in ``#### number``."""

import json
import random
from pathlib import Path

STORIES = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "{a} + {b}", int.__add__),
    ("{name} had {a} {things} and lost {b} of them. How many {things} are left?", "{a} - {b}", int.__sub__),
    ("{name} fills {a} boxes with {b} {things} each. How many {things} is that?", "{a} * {b}", int.__mul__),
)
NAMES, THINGS = ("Ada", "Björn", "Chen", "Dina"), ("apples", "pens", "stamps", "marbles")


def question(seed: int) -> dict[str, str]:
    rng = random.Random(seed)
    story, formula, operation = rng.choice(STORIES)
    b, a = sorted((rng.randint(2, 60), rng.randint(2, 60)))
    text = story.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    result = operation(a, b)
    return {"question": text, "answer": f"{formula.format(a=a, b=b)} = {result}\n#### {result}"}


def write_questions(path: Path, seeds: range) -> Path:
    path.write_text("".join(json.dumps(question(seed)) + "\n" for seed in seeds), encoding="utf-8")
    return path
