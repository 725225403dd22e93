"""Grading of short answers: strict exact match and token F1 after SQuAD's normalisation, and both as a metric."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ASCII_PUNCTUATION = frozenset(string.punctuation)


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space (Rajpurkar et al. 2016, SQuAD).

    As SQuAD's own wherever that leaves a word, with two additions: Unicode punctuation counts as punctuation, and a
    text of nothing but articles keeps them, so that "A" is an answer of its own and not the empty one.
    """
    lower = unicodedata.normalize("NFC", text).lower()
    kept = "".join(character for character in lower if not _is_punctuation(character))
    plain = unicodedata.normalize("NFC", kept)  # an accent may have stood behind what is gone
    return " ".join(_ARTICLES.sub(" ", plain).split() or plain.split())


def _is_punctuation(character: str) -> bool:
    return character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")


def exact_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether ``answer`` equals one of ``accepted`` after normalisation; an answer without a word equals none."""
    given = normalize(answer)
    return bool(given) and any(given == normalize(text) for text in accepted)


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, in [0, 1], for the accepted answer that is nearest."""
    given = normalize(answer).split()
    return max((_f1(given, normalize(text).split()) for text in accepted), default=0.0)


def _f1(given: list[str], accepted: list[str]) -> float:
    shared = (Counter(given) & Counter(accepted)).total()
    return 2 * shared / (len(given) + len(accepted)) if shared else 0.0


class AnswerScores(Metric):
    """Shares of exact matches and mean token F1 over questions, both in [0, 1]; NaN before the first.

    :class:`torchmetrics.text.SQuAD` counts an empty answer, or a bare article, as right wherever the accepted answer
    is an article, and knows ASCII punctuation only.
    """

    full_state_update = False
    matches: Tensor
    f1: Tensor
    questions: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("matches", "f1", "questions"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answer: str, accepted: Sequence[str]) -> None:
        """Count one answer and what would have been accepted."""
        self.matches += exact_match(answer, accepted)
        self.f1 += token_f1(answer, accepted)
        self.questions += 1

    def compute(self) -> dict[str, Tensor]:
        """``exact_match`` and ``token_f1``, scalars in float64."""
        return {"exact_match": self.matches / self.questions, "token_f1": self.f1 / self.questions}
