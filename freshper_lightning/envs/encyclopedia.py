"""A small made-up encyclopedia with one- and two-hop questions, and imperfect readers of it."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from freshper_lightning.envs.protocol import spoken
from freshper_lightning.envs.search import SearchQuestion
from freshper_lightning.replacing import replacing
from freshper_lightning.retrieval import build_index, is_index

FIRST = tuple(re.findall("..", "BaCeDiFoGuHaJeKiLoMuNaPeRiSoTuVaWeXiYoZu"))
LAST = tuple(re.findall("...", "bakcelditfomgurhaxjevkiplodmunnazpexrifsogtuvvamwekxilyobzud"))
"""Syllables of names; every name is one of each."""

VALUES = {
    "color": ("amber", "black", "crimson", "green", "ivory", "purple", "silver", "yellow"),
    "food": ("bread", "cheese", "figs", "honey", "lentils", "mushrooms", "plums", "turnips"),
    "trade": ("baker", "cooper", "fisher", "glazier", "mason", "potter", "tanner", "weaver"),
}
"""What is known of everybody beside a friend."""
FRIEND = "friend"

ISOLATE = "|".join(
    [
        rf"(?:{'|'.join(FIRST)})(?=(?:{'|'.join(LAST)})\b)",
        rf"(?:{'|'.join(LAST)})\b",
        rf"\b(?:{'|'.join(value for values in VALUES.values() for value in values)})\b",
        rf"\b(?:{'|'.join([*VALUES, FRIEND])})\b",
        r"</?(?:search|answer)>",
        r"\d",
    ]
)
"""What a tokenizer should keep in tokens of their own: syllables, values, attributes, tags, digits."""

SPLITS = ("train", "heldout")
CORPUS, INDEX = "corpus.jsonl", "index"

_FRIEND_OF = re.compile(rf"The {FRIEND} of \w+ is (\w+)\.")
_VALUE_OF = re.compile(rf"The (?:{'|'.join(VALUES)}) of \w+ is (\w+)\.")
_ASKED = re.compile(r"Question: what is the (\w+) of (?:the (friend) of )?(\w+)\?")


@dataclass(frozen=True, slots=True)
class Person:
    """An entity of the encyclopedia; the friend belongs to the same split."""

    name: str
    values: dict[str, str]
    friend: str

    def page(self) -> str:
        """Title and text; the name stands in every sentence, so that its own page is the best match."""
        facts = [*self.values.items(), (FRIEND, self.friend)]
        return f"{self.name}\n" + " ".join(f"The {key} of {self.name} is {value}." for key, value in facts)


def draw_people(split: str, number: int, seed: int) -> list[Person]:
    """People whose names no other split has: where half of all names would not do, there is an error.

    Raises:
        ValueError: ``number`` is not in [2, half the names].
    """
    names = [first + last for first, last in product(FIRST, LAST)]
    most = len(names) // len(SPLITS)
    if not 2 <= number <= most:
        raise ValueError(f"people of the split {split} must be in [2, {most}], not {number}")
    order = np.random.default_rng([seed, 0]).permutation(len(names))
    mine = order[SPLITS.index(split) * most :][:number]
    rng = np.random.default_rng([seed, 1 + SPLITS.index(split)])
    shifts = rng.integers(1, number, number)
    return [
        Person(
            name=names[mine[index]],
            values={key: str(rng.choice(values)) for key, values in VALUES.items()},
            friend=names[mine[(index + shifts[index]) % number]],
        )
        for index in range(number)
    ]


def questions_about(people: Sequence[Person]) -> Iterator[dict[str, Any]]:
    """One- and two-hop questions, as many of each; their answers are values."""
    by_name = {person.name: person for person in people}
    for person in people:
        for key in VALUES:
            yield {"question": f"what is the {key} of {person.name}?", "answer": [person.values[key]]}
            answer = by_name[person.friend].values[key]
            yield {"question": f"what is the {key} of the {FRIEND} of {person.name}?", "answer": [answer]}


def write_encyclopedia(path: str | Path, train: int, heldout: int, seed: int) -> int:
    """Write corpus, index and the questions of both splits to a folder; returns the number of pages.

    ``corpus.jsonl`` and ``index`` cover everybody, ``train.jsonl`` and ``heldout.jsonl`` ask about people apart. Equal
    arguments give equal files. An encyclopedia that is there is replaced once all is written.

    Raises:
        ValueError: There are too few or too many people, or the folder holds something else or cannot be written.
    """
    people = {split: draw_people(split, number, seed) for split, number in zip(SPLITS, (train, heldout), strict=True)}
    pages = ({"id": str(i), "contents": p.page()} for i, p in enumerate(p for split in SPLITS for p in people[split]))
    with replacing(path, is_encyclopedia, "an encyclopedia") as folder:
        for split in SPLITS:
            _write(folder / f"{split}.jsonl", questions_about(people[split]))
        _write(folder / CORPUS, pages)
        return build_index(folder / CORPUS, folder / INDEX)


def is_encyclopedia(folder: Path) -> bool:
    """Whether a folder holds what :func:`write_encyclopedia` writes, and nothing else.

    A folder of somebody's own questions may have the same names.
    """
    questions = [folder / f"{split}.jsonl" for split in SPLITS]
    return (
        set(folder.iterdir()) == {*questions, folder / CORPUS, folder / INDEX}
        and is_index(folder / INDEX)
        and all(path.read_bytes().startswith(b'{"question": "what is the ') for path in questions)
    )


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Reader:
    """Knows nothing but what it is shown: asks for the person of the question, then for the friend, then answers."""

    def __init__(self, question: str) -> None:
        asked = _ASKED.search(question)
        if asked is None:
            raise ValueError(f"a reader of the encyclopedia cannot answer {question!r}")
        self.key, self.hop, self.name = asked.groups()
        self.shown = ""

    def see(self, observation: str) -> None:
        """Remember a page."""
        self.shown += observation

    def move(self) -> str:
        """The reply that leads to the answer by the shortest way."""
        name = self._find(FRIEND, self.name) if self.hop else self.name
        value = None if name is None else self._find(self.key, name)
        return f"<search>{name or self.name}</search>" if value is None else f"<answer>{value}</answer>"

    def mistake(self, rng: np.random.Generator) -> str:
        """An answer with any value that was seen, or a search for any name, as often the one as the other.

        Where nothing was seen yet, the answer is a guess.
        """
        if rng.random() < 0.5:
            return f"<answer>{rng.choice(_VALUE_OF.findall(self.shown) or VALUES[self.key])}</answer>"
        return f"<search>{rng.choice([self.name, *_FRIEND_OF.findall(self.shown)])}</search>"

    def _find(self, key: str, name: str) -> str | None:
        fact = re.search(rf"The {key} of {name} is (\w+)\.", self.shown)
        return None if fact is None else fact.group(1)


def demonstrate(seed: int, noise: float, **kwargs: Any) -> list[tuple[str, str]]:
    """One episode of imperfect play: the user message and the reply of each turn.

    Each reply is a mistake with probability ``noise``, by the seed alone; ``kwargs`` are those of
    :class:`SearchQuestion`.

    Raises:
        ValueError: ``noise`` is not in [0, 1], or a question is not one of the encyclopedia's.
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be in [0, 1], not {noise}")
    env = SearchQuestion(**kwargs)
    rng = np.random.default_rng([seed, 1])
    observation, _ = env.reset(seed=seed)
    reader, turns, over = Reader(observation), [], False
    while not over:
        reply = reader.mistake(rng) if rng.random() < noise else reader.move()
        turns.append((observation, reply))
        observation, _, terminated, truncated, _ = env.step(reply)
        reader.see(observation)
        over = terminated or truncated
    return turns


def corpus(n: int, seed: int, **kwargs: Any) -> Iterator[str]:
    """Everything said in ``n`` episodes of clumsy play, for training a tokenizer.

    Syllables and values come once per episode as well: each is to become one token, whether it is played or not.
    """
    names = [first + last for first, last in zip(FIRST, LAST, strict=True)]
    words = " ".join(names + [value for values in VALUES.values() for value in values])
    with TemporaryDirectory() as folder:
        write_encyclopedia(folder, train=100, heldout=2, seed=seed)
        files = {"questions": f"{folder}/train.jsonl", "index": f"{folder}/index"}
        for episode in range(n):
            yield words
            yield from spoken(demonstrate(seed + episode, 0.4, **files, **kwargs))
