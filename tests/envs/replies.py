"""Replies that no environment may accept: broken tags, several answers, other scripts, pages of text."""

import random
from collections.abc import Iterator

PIECES = (
    *("<answer>", "</answer>", "<ANSWER>", "<answer ", "</answer", "<answer/>", "<think>", "</think>", "<search>"),
    *("<information>the answer is it</information>", "<|im_end|>", "####", "#", "\n", "\n\n", " ", "\x00", "\u202e"),
    *("√", "你好", "٣", "𝟙", "{", "}", "$", "\\boxed{", "\\frac{", "^", "_", "(", ")", "&", "%", ",", "or", "a"),
    *("answer", "Left", "nan", "inf", "None"),
)
"""None of them is, or makes, a number."""


def malformed_replies(count: int, right: str, seed: int = 0) -> Iterator[str]:
    """``count`` replies, some with the right answer where it must not count; the same for equal arguments."""
    rng = random.Random(seed)
    whole = (
        "",
        right,
        f"The answer is {right}.",
        f"<answer>{right}</answer><answer>{right}1</answer>\n",
        f"<answer><answer>{right}</answer>\n",
        f"<answer>{right}",
        f"{right}</answer>",
        f"<answer>page {right}</answer>\n#### page {right}",
        f"<search>{right}</search>\n#### {right} or so",
        "\ud800",
        "x" * 20_000,
        "<answer>" * 2_000,
    )
    yield from whole[:count]
    for _ in range(count - len(whole)):
        yield "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
