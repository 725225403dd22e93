import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper_lightning.policy.tiny import byte_tokenizer, train_tokenizer
from freshper_lightning.rollout.conversation import ChatFormat, ChatTemplateError, Conversation
from tests.rollout import templates
from tests.rollout.templates import byte_level, tokenizer_for

IM = ["<|im_start|>", "<|im_end|>"]
STABLE = ["chatml", "qwen2", "llama3", "gemma"]
CHATS = {name: ChatFormat(tokenizer_for(name)) for name in STABLE}
CHATS["qwen3 verbatim"] = ChatFormat(tokenizer_for("qwen3"), history="verbatim")

# white space at the borders of a message is dropped by some of the templates, as it is by their models
TEXT = st.text(max_size=20).map(str.strip)
EXCHANGES = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)


def encode(chat, text):
    return chat.tokenizer.encode(text, add_special_tokens=False)


def rendered(chat, messages, head=True):
    return chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=head)


def play(chat, exchanges, last_user, system=None, ended=True):
    """The conversation token by token, and as messages."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    conversation = None
    for user, reply in exchanges:
        if conversation is None:
            conversation = Conversation(chat, user, system)
        else:
            conversation.add_user(user)
        conversation.add_reply(encode(chat, reply) + [chat.end_token_id] * ended)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    conversation.add_user(last_user)
    return conversation, [*messages, {"role": "user", "content": last_user}]


@pytest.mark.parametrize("name", CHATS)
@given(exchanges=EXCHANGES, last_user=TEXT, system=st.one_of(st.none(), TEXT))
@settings(max_examples=60, deadline=None)
def test_a_conversation_is_the_templates_rendering_token_by_token(name, exchanges, last_user, system):
    chat = CHATS[name]
    conversation, messages = play(chat, exchanges, last_user, None if name == "gemma" else system)
    expected = rendered(chat, messages)
    assert conversation.text() == expected
    assert conversation.token_ids == encode(chat, expected)


@pytest.mark.parametrize("name", CHATS)
@given(exchanges=EXCHANGES, last_user=TEXT)
@settings(max_examples=40, deadline=None)
def test_a_reply_without_end_token_gets_one_that_is_not_sampled(name, exchanges, last_user):
    chat = CHATS[name]
    exchanges = [(user, f"{reply}!") for user, reply in exchanges]
    ended, _ = play(chat, exchanges, last_user)
    cut, _ = play(chat, exchanges, last_user, ended=False)
    assert cut.token_ids == ended.token_ids
    assert sum(ended.sampled_mask()) - sum(cut.sampled_mask()) == len(exchanges)
    assert all(cut.token_ids[end] == chat.end_token_id for _, end in cut.turns)


@pytest.mark.parametrize("name", CHATS)
@given(replies=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_sampled_tokens_stay_as_they_came_even_where_they_are_no_text(name, replies):
    """Random bytes are mostly no UTF-8: decoding and encoding again would change them."""
    chat = CHATS[name]
    conversation = Conversation(chat, "Go")
    for index, reply in enumerate(replies):
        if index:
            conversation.add_user("On")
        conversation.add_reply(reply)
    sampled = [token for token, kept in zip(conversation.token_ids, conversation.sampled_mask(), strict=True) if kept]
    assert sampled == [token for reply in replies for token in reply]
    assert [conversation.token_ids[start:end] for start, end in conversation.turns] == replies


def test_a_tokenisation_that_the_tokenizer_would_not_choose_is_kept():
    chat = ChatFormat(train_tokenizer(["banana " * 50], 300, isolate="x"))
    one_by_one = [encode(chat, letter)[0] for letter in "banana"]
    assert len(encode(chat, "banana")) < len(one_by_one)
    conversation = Conversation(chat, "Fruit?")
    assert conversation.add_reply([*one_by_one, chat.end_token_id]) == "banana"
    conversation.add_user("Another?")
    start, end = conversation.turns[0]
    assert conversation.token_ids[start:end] == [*one_by_one, chat.end_token_id]


@pytest.mark.parametrize(
    ("name", "end_token"),
    [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>"), ("qwen3 verbatim", "<|im_end|>")],
)
def test_the_end_token_is_read_off_the_template(name, end_token):
    assert CHATS[name].end_token == end_token


def test_any_other_stop_token_is_followed_by_the_end_of_the_turn():
    chat = CHATS["gemma"]
    conversation = Conversation(chat, "Hi")
    conversation.add_reply(encode(chat, "Bye<eos>"))
    conversation.add_user("So?")
    assert conversation.text().endswith(
        "Bye<eos><end_of_turn>\n<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_the_text_of_a_reply_has_no_special_tokens():
    conversation = Conversation(CHATS["chatml"], "Hi")
    assert conversation.add_reply(encode(conversation.chat, "Bye <b>you</b><|im_end|>")) == "Bye <b>you</b>"


def test_the_system_prompt_comes_first():
    chat = CHATS["chatml"]
    assert Conversation(chat, "Hi", "Be brief.").text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_a_template_that_strips_thinking_is_refused_unless_replies_are_kept_by_name():
    tokenizer = tokenizer_for("qwen3")
    with pytest.raises(ChatTemplateError, match=r'(?s)rewrites earlier replies: .*<think>.*history="verbatim"'):
        ChatFormat(tokenizer)
    chat = ChatFormat(tokenizer, history="verbatim")
    thought = "<think>\nHm.\n</think>\n\nYes"
    conversation, messages = play(chat, [("Is it?", thought)], "Sure?")
    assert thought in conversation.text()
    assert thought not in rendered(chat, messages)
    assert conversation.text().replace("<think>\nHm.\n</think>\n\n", "") == rendered(chat, messages)


def test_a_prompt_that_opens_the_thinking_is_verbatim_only_and_keeps_its_opening():
    tokenizer = tokenizer_for("r1")
    with pytest.raises(ChatTemplateError, match=r'(?s)<think>.*history="verbatim"'):
        ChatFormat(tokenizer)
    conversation, _ = play(ChatFormat(tokenizer, history="verbatim"), [("Is it?", "Hm.\n</think>Yes")], "Sure?")
    assert conversation.text() == (
        "<|User|>Is it?<|Assistant|><think>\nHm.\n</think>Yes<|end|><|User|>Sure?<|Assistant|><think>\n"
    )


def test_blanks_around_replies_are_verbatim_only():
    tokenizer = tokenizer_for("llama2")
    with pytest.raises(ChatTemplateError, match="special token right after a reply"):
        ChatFormat(tokenizer)
    conversation, _ = play(ChatFormat(tokenizer, history="verbatim"), [("A?", " B")], "C?")
    assert conversation.text() == "<s>[INST] A? [/INST] B</s><s>[INST] C? [/INST]"


@pytest.mark.parametrize("history", ["strict", "verbatim"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (templates.COUNTS_AT_THE_HEAD, "(?s)rewrites earlier turns.*1 messages.*3 messages"),
        (templates.COUNTS_IN_TURNS, "rewrites earlier turns"),
        (templates.NUMBERS_TURNS, "rewrites earlier turns"),
        (templates.REPEATS_THE_SYSTEM, "(?s)rewrites earlier turns.*Instructions of the system"),
        (templates.NO_END, "special token right after a reply"),
        (templates.KEEPS_THE_FIRST_USER, "special token right after a reply, not ''"),
        (templates.SHOUTS_LATER_REPLIES, "rewrites earlier replies"),
        (templates.FORGETS_USERS, "rewrites earlier turns"),
        (templates.FORGETS_REPLIES, "does not repeat a reply"),
    ],
)
def test_templates_that_break_the_prefix_property_are_refused_in_words(template, message, history):
    with pytest.raises(ChatTemplateError, match=message):
        ChatFormat(byte_level(template, IM, IM[1]), history=history)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatFormat(byte_level(None, IM, IM[1]))


def test_an_unknown_history_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"history.*strict, verbatim.*'loose'"):
        ChatFormat(byte_tokenizer(), history="loose")


def test_a_system_prompt_for_a_template_without_one_is_refused():
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        Conversation(CHATS["gemma"], "Hi", "Be brief.")


def test_replies_and_user_messages_must_alternate():
    conversation = Conversation(CHATS["chatml"], "Hi")
    with pytest.raises(ValueError, match="must follow a reply"):
        conversation.add_user("Hello?")
    with pytest.raises(ValueError, match="at least one token"):
        conversation.add_reply([])
    conversation.add_reply([1])
    with pytest.raises(ValueError, match="must follow a user message"):
        conversation.add_reply([1])


def test_a_prompt_is_the_same_on_every_day():
    chat = ChatFormat(byte_level(templates.WRITES_THE_DATE, IM, "<|im_end|>"))
    assert chat.decode(chat.prompt_ids("What day is it?")).startswith("system\n26 Jul 2024\n")
