"""Questions that are answered with the help of a search engine: think, search, answer."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import gymnasium

from freshper_lightning.envs.answers import exact_match, normalize, token_f1
from freshper_lightning.envs.protocol import ReplySpace
from freshper_lightning.envs.questions import identity
from freshper_lightning.errors import require_count
from freshper_lightning.jsonl import read_jsonl
from freshper_lightning.retrieval import Document, Retriever, open_index, open_server

log = logging.getLogger(__name__)

MAX_QUERY = 512
"""Characters of a query that are searched for."""

HINT = "Reply with one <search>query</search> or one <answer>short answer</answer>."

_NAMES = "(?:think|search|answer|information)"
_TAG = re.compile(f"</?{_NAMES}>")
_HALF = re.compile(f"<{_NAMES}|</{_NAMES}|{_NAMES}>")
"""Of a tag that lacks a bracket, in what stands between whole tags."""
_THOUGHTS = (("<think>", "</think>"), ("</think>",))
"""How a reply may begin; the opening tag is missing where the chat template writes it into the prompt."""
_BRACKETS = str.maketrans("<>", "‹›")


@dataclass(frozen=True, slots=True)
class Move:
    """What a reply asks for; ``text`` is the query or the answer, and empty for a thought."""

    kind: Literal["think", "search", "answer"]
    text: str = ""


def parse_reply(reply: str) -> Move | None:
    """The one move of a reply; nothing where it is not exactly one.

    All tags of the reply count, wherever they stand: at most one thought, which comes first and holds no other tag,
    then at most one search or one answer with something in it, and neither half a tag nor an ``<information>``. Text
    outside of tags does not matter.
    """
    if any(_HALF.search(piece) for piece in _TAG.split(reply)):
        return None
    tags = list(_TAG.finditer(reply))
    names = tuple(tag.group() for tag in tags)
    thought = next((names[: len(opening)] for opening in _THOUGHTS if names[: len(opening)] == opening), ())
    if thought == names:
        return Move("think") if thought else None
    acting = tags[len(thought) :]
    kind = acting[0].group().strip("<>")
    if kind not in ("search", "answer") or names[len(thought) :] != (f"<{kind}>", f"</{kind}>"):
        return None
    text = reply[acting[0].end() : acting[1].start()].strip()
    return Move("search" if kind == "search" else "answer", text) if text else None


def neutralize(text: str) -> str:
    """``text`` on one line, without angle brackets: neither a tag of the protocol nor a special token in them."""
    return " ".join(text.translate(_BRACKETS).split())


@dataclass(frozen=True, slots=True)
class Question:
    """A question and every answer that is accepted; one of punctuation alone equals no reply."""

    text: str
    answers: tuple[str, ...]


class SearchQuestion(gymnasium.Env[str, str]):
    """Answer a question after searches; reward 1 for an answer that is accepted, 0 for everything else.

    An answer ends the episode, and is accepted where it equals one of the question's after SQuAD's normalisation. A
    search shows the best documents inside ``<information>``, with every angle bracket replaced: nothing that a document
    says can score or end anything. A search more than ``max_searches`` ends the episode with 0; the last of
    ``max_turns`` replies truncates it. A thought alone is a valid turn without effect; see :func:`parse_reply` for what
    is not valid. The seed of ``reset`` chooses the question, uniformly and with nothing else. A retriever that fails
    raises :class:`RetrievalError`, which is the loss of the episode and not a wrong answer.

    ``info["scores"]`` of the last step has ``token_f1``. Protocol after Search-R1 (Jin et al. 2025).

    Args:
        questions: JSONL file of questions.
        index: Folder of a BM25 index; exactly one of ``index`` and ``server`` must be given.
        server: Address of a server that speaks Search-R1's protocol.
        server_options: Further arguments of :class:`HTTPRetriever`.
        top_k: Documents per search, at least 1.
        max_searches: Searches per episode, at least 1.
        max_turns: Replies per episode, at least 1.
        document_characters: Characters of a document's text that are shown, at least 1.
        question_field: Holds the question.
        answer_field: Holds the accepted answers, a list of texts or one text.

    Raises:
        ValueError: An argument is out of range, or the questions or the index cannot be read; the message names it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium declares it as an instance variable)

    def __init__(
        self,
        questions: str,
        index: str | None = None,
        server: str | None = None,
        server_options: Mapping[str, Any] | None = None,
        top_k: int = 3,
        max_searches: int = 4,
        max_turns: int = 6,
        document_characters: int = 1000,
        question_field: str = "question",
        answer_field: str = "answer",
    ) -> None:
        limits = {
            "top_k": top_k,
            "max_searches": max_searches,
            "max_turns": max_turns,
            "document_characters": document_characters,
        }
        for name, value in limits.items():
            require_count(name, value)
        self.top_k, self.max_searches, self.max_turns = top_k, max_searches, max_turns
        self.document_characters = document_characters
        self.questions = _read_questions(questions, question_field, answer_field)
        self.retriever = _open(index, server, server_options or {})
        self.question: Question | None = None
        self.searches_left, self.turns_left = max_searches, max_turns
        self.observation_space = ReplySpace()  # what a corpus says is not known
        self.action_space = ReplySpace()

    @property
    def instances(self) -> frozenset[str]:
        """What tells the questions from those of another file."""
        return frozenset(identity(question.text) for question in self.questions)

    def instruction(self) -> str:
        """The rules as the policy is told them; depends on the configuration, not on the question."""
        return (
            "Answer the question with the help of a search engine.\n"
            "<search>query</search> shows what is found; "
            f"you have {self.max_searches} searches and {self.max_turns} replies.\n"
            "<answer>short answer</answer> ends the task: reward 1 if it is right, 0 if not.\n"
            "You may think first inside <think></think>, then either search once or answer once."
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the question that ``seed`` determines and return it below the instruction."""
        super().reset(seed=seed)
        self.question = self.questions[int(self.np_random.integers(len(self.questions)))]
        self.searches_left, self.turns_left = self.max_searches, self.max_turns
        return f"{self.instruction()}\nQuestion: {neutralize(self.question.text)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the move of the reply, if it has one.

        Raises:
            gymnasium.error.ResetNeeded: The episode is over.
            RetrievalError: The retriever failed.
        """
        if self.question is None:
            raise gymnasium.error.ResetNeeded("the question has been answered or given up; call reset")
        move = parse_reply(action)
        self.turns_left -= 1
        if move is not None and move.kind == "answer":
            return self._end(move.text)
        if move is not None and move.kind == "search" and self.searches_left == 0:
            return self._end(None)
        # what the last reply searches for, nobody would read
        query = move.text if move is not None and move.kind == "search" and self.turns_left > 0 else None
        said = HINT if query is None else self._information(query)
        info: dict[str, Any] = {"valid": move is not None, "effective": query is not None, "success": False}
        info["scores"] = {"token_f1": 0.0}
        if self.turns_left == 0:
            self.question = None
        left = f"Searches left: {self.searches_left}\nReplies left: {self.turns_left}"
        return f"{said}\n{left}", 0.0, False, self.question is None, info

    def _end(self, answer: str | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The last step: an answer, or one search too many."""
        assert self.question is not None
        accepted = self.question.answers
        success = answer is not None and exact_match(answer, accepted)
        scores = {"token_f1": 0.0 if answer is None else token_f1(answer, accepted)}
        self.question = None
        info = {"valid": True, "effective": answer is not None, "success": success, "scores": scores}
        return f"Reward: {int(success)}", float(success), True, False, info

    def _information(self, query: str) -> str:
        self.searches_left -= 1
        query = query[:MAX_QUERY].encode(errors="replace").decode()  # half a surrogate pair is no UTF-8
        found = self.retriever.search(query, self.top_k)
        pages = [self._page(number, document) for number, document in enumerate(found, start=1)]
        return "\n".join(["<information>", *(pages or ["Nothing found."]), "</information>"])

    def _page(self, number: int, document: Document) -> str:
        text = neutralize(document.text)[: self.document_characters]
        return f"Doc {number}: {neutralize(document.title)[: self.document_characters]}\n{text}"


def _open(index: str | None, server: str | None, options: Mapping[str, Any]) -> Retriever:
    if index is not None and server is None:
        return open_index(index)
    if server is None or index is not None:
        raise ValueError(f"exactly one of index and server must be given, not index={index!r}, server={server!r}")
    try:
        return open_server(server, tuple(sorted(options.items())))
    except TypeError as error:
        allowed = "timeout, attempts, backoff, concurrency"
        raise ValueError(f"server_options={dict(options)} cannot be used: {error}; allowed: {allowed}") from error


@cache
def _read_questions(path: str, question_field: str, answer_field: str) -> tuple[Question, ...]:
    questions = tuple(
        _question(row, f"questions={path!r}: row {number}", question_field, answer_field)
        for number, row in enumerate(read_jsonl(path, "questions"), start=1)
    )
    if not questions:
        raise ValueError(f"questions={path!r} holds no questions")
    hopeless = sum(not any(map(normalize, question.answers)) for question in questions)
    if hopeless:
        log.warning("questions=%r: %d of %d have no answer with a word in it", path, hopeless, len(questions))
    return questions


def _question(row: Mapping[str, Any], where: str, question_field: str, answer_field: str) -> Question:
    for key, name in (("question_field", question_field), ("answer_field", answer_field)):
        if name not in row:
            raise ValueError(f"{where} has no {key}={name!r}; its fields are {', '.join(row)}")
    text, given = row[question_field], row[answer_field]
    answers: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {question_field} must be a text, not {text!r}")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{where}: {answer_field} must be a text or a list of texts, not {given!r}")
    return Question(text.strip(), tuple(answers))
