"""Token-exact multi-turn chat: what was sampled stays as it was sampled, and only user turns are tokenised."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, get_args

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

History = Literal["strict", "verbatim"]

_PLAIN = ("Reply one stands here.", "Reply two stands here.")
_THINKING = tuple(f"<think>\nThought before it.\n</think>\n\n{reply}" for reply in _PLAIN)
_USERS = ("First question?", "Second question?", "Third question?")
_SYSTEM = "Instructions of the system."
_REMEDY = (
    'use history="verbatim" to keep earlier replies as they were sampled, thinking included, which differs from what '
    "the template renders, or a template that leaves them alone"
)


_TODAY = datetime(2024, 7, 26)
"""What templates that write the date are told, so that a seed has the same prompts on any day; where Llama 3's gets no
date it writes this one."""


class ChatTemplateError(ValueError):
    """A chat template that a conversation cannot be built from token by token; the message says why."""


class ChatFormat:
    """How a tokenizer's chat template opens a conversation and continues it after a reply.

    The rendering of a conversation must consist of the rendering of its first prompt, the replies, and between them
    *increments* that depend on nothing but the next user message: the token that ends a reply, the user's turn, and
    the head of the next reply. This is checked once, here, on conversations with and without a system prompt:

    * ``history="strict"``: it holds for replies with and without thinking, so that the token-exact conversation is
      what the template would render, but for white space at the ends of a reply, which some templates take away.
    * ``history="verbatim"``: the template may rewrite earlier replies (Qwen3 removes their thinking) and what it puts
      at the head of a reply; everything else must hold. Earlier replies stay in the context as they were sampled,
      thinking included, which differs from what the template would render.

    Raises:
        ValueError: ``history`` is unknown.
        ChatTemplateError: The tokenizer has no chat template, or the template breaks the property above.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, history: History = "strict") -> None:
        if history not in get_args(History):
            raise ValueError(f"history must be one of {', '.join(get_args(History))}, not {history!r}")
        if not tokenizer.chat_template:
            raise ChatTemplateError("the tokenizer has no chat template; set tokenizer.chat_template")
        self.tokenizer = tokenizer
        self.history = history
        self.end_token_id = self._find_end_token()
        self.end_token = str(tokenizer.convert_ids_to_tokens(self.end_token_id))
        for system in self._systems():
            self._check(_PLAIN, system, exact=history == "strict")
            if history == "strict":
                self._check(_THINKING, system, exact=True)

    def prompt_ids(self, user: str, system: str | None = None) -> list[int]:
        """Tokens of the first prompt: system prompt, first user message and the head of the reply."""
        return self._encode(self._render(_messages([user], [], system)))

    def increment_ids(self, user: str, ended: bool) -> list[int]:
        """Tokens between a reply and the next one; the end token comes first unless the reply ``ended`` with it."""
        ids = self._encode(self.end_token + self._closing(user).partition(self.end_token)[2])
        return ids[1:] if ended else ids

    def reply_ids(self, text: str) -> list[int]:
        """Tokens of a reply that somebody else wrote, such as a demonstration: ``text`` and the end token."""
        return [*self._encode(text), self.end_token_id]

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Text of ``ids``, as it stands, without special tokens unless they are to be kept."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, strftime_now=_TODAY.strftime
            )
            return str(rendered)
        except TemplateError as error:
            roles = " ".join(message["role"] for message in messages)
            raise ChatTemplateError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        encoding: Any = self.tokenizer(text, add_special_tokens=False)
        return [int(index) for index in encoding["input_ids"]]

    def _closing(self, user: str) -> str:
        """What the template writes after a reply when ``user`` comes next."""
        rendered = self._render(_messages([_USERS[0], user], _PLAIN[:1], None))
        _, found, closing = rendered.partition(_PLAIN[0])
        if not found:
            raise ChatTemplateError(f"the chat template does not repeat a reply in later prompts: {rendered!r}")
        return closing

    def _find_end_token(self) -> int:
        closing = self._closing(_USERS[1])
        text = closing if self.history == "strict" else closing.lstrip()
        ids = self._encode(text)
        if not ids or ids[0] not in self.tokenizer.added_tokens_decoder:
            raise ChatTemplateError(
                f"the chat template must put a special token right after a reply, not {closing!r}: without it nobody "
                'can tell where a sampled reply ends (history="verbatim" allows white space ahead of the token)'
            )
        return ids[0]

    def _systems(self) -> list[str | None]:
        """System prompts to check with; some templates (Gemma's) know no system role."""
        try:
            self._render(_messages(_USERS[:1], [], _SYSTEM))
        except ChatTemplateError:
            return [None]
        return [None, _SYSTEM]

    def _check(self, replies: Sequence[str], system: str | None, exact: bool) -> None:
        """Compare what every prompt had with what the later ones have around ``replies``."""
        own = [self._render(_messages(_USERS[:1], [], system)), *(self._closing(user) for user in _USERS[1:])]
        for turn in range(1, len(_USERS)):
            rendered = self._render(_messages(_USERS[: turn + 1], replies[:turn], system))
            later = _split(rendered, replies[:turn])
            if later is None:
                raise ChatTemplateError(
                    f"the chat template rewrites earlier replies: {replies[0]!r} does not stand in {rendered!r}; "
                    + (_REMEDY if exact else "use a template that leaves them alone")
                )
            for position, user in enumerate(_USERS[: turn + 1]):
                headless = position < turn and user in later[position]
                _compare(own[position], later[position], exact, headless)


class Conversation:
    """One chat as token ids: a prompt, then sampled replies and user turns in alternation.

    Sampled tokens are appended as they came and never decoded and encoded again; ``turns`` are their spans.
    """

    def __init__(self, chat: ChatFormat, user: str, system: str | None = None) -> None:
        self.chat = chat
        self.token_ids: list[int] = chat.prompt_ids(user, system)
        self.turns: list[tuple[int, int]] = []

    def add_reply(self, token_ids: Sequence[int]) -> str:
        """Append sampled tokens, the end token included where it was sampled, and return the reply's text.

        Raises:
            ValueError: No tokens, or the last turn is a reply already.
        """
        if not token_ids:
            raise ValueError("a reply has at least one token")
        start = len(self.token_ids)
        if self.turns and self.turns[-1][1] == start:
            raise ValueError("a reply must follow a user message")
        self.token_ids.extend(token_ids)
        self.turns.append((start, len(self.token_ids)))
        return self.chat.decode(token_ids)

    def add_user(self, text: str) -> None:
        """Append the increment of a user message; an end token that the reply lacks comes first, unsampled.

        Raises:
            ValueError: The last turn is not a reply.
        """
        if not self.turns or self.turns[-1][1] != len(self.token_ids):
            raise ValueError("a user message must follow a reply")
        self.token_ids.extend(self.chat.increment_ids(text, self.token_ids[-1] == self.chat.end_token_id))

    def sampled_mask(self) -> list[bool]:
        """One value per token: whether it was sampled."""
        mask = [False] * len(self.token_ids)
        for start, end in self.turns:
            mask[start:end] = [True] * (end - start)
        return mask

    def text(self) -> str:
        """The whole conversation, special tokens included."""
        return self.chat.decode(self.token_ids, keep_special=True)


def _messages(users: Sequence[str], replies: Sequence[str], system: str | None) -> list[dict[str, str]]:
    """A conversation of one user message more than there are replies."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn, user in enumerate(users):
        messages.append({"role": "user", "content": user})
        messages.extend({"role": "assistant", "content": reply} for reply in replies[turn : turn + 1])
    return messages


def _split(text: str, replies: Sequence[str]) -> list[str] | None:
    """The pieces of ``text`` around ``replies``, or nothing where one of them does not stand in it."""
    pieces = []
    for reply in replies:
        piece, found, text = text.partition(reply)
        if not found:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _compare(own: str, later: str, exact: bool, headless: bool) -> None:
    """Refuse a turn that reads differently in a later prompt.

    ``headless``: in an earlier turn the head of the reply (an opened thinking tag, a blank) belongs to the reply, which
    stays as it was unless the rendering must be ``exact``.
    """
    if own == later:
        return
    only_head = headless and own.startswith(later.rstrip())
    if exact or not only_head:
        raise ChatTemplateError(
            f"the chat template rewrites earlier turns: where one prompt has {own!r}, a later one has {later!r}; "
            + (_REMEDY if only_head else "use a template in which a turn does not depend on the other turns")
        )
