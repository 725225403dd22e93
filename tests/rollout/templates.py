"""Small chat templates in the style of well-known families, each with a byte-level tokenizer of its special tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a default system prompt where there is none
QWEN2 = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<|begin_of_text|>{% endif %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# thinking is kept only after the last user message
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# no system role, another name for the assistant, and roles must alternate
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# the prompt opens the thinking, and earlier replies lose theirs
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# blanks around the reply
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
    "{% else %}<s>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)

COUNTS_AT_THE_HEAD = "<|im_start|>{{ messages | length }} messages<|im_end|>\n" + CHATML
COUNTS_IN_TURNS = CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.index }} of {{ messages | length }}\n")
NUMBERS_TURNS = CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.index }}\n")
WRITES_THE_DATE = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHATML
REPEATS_THE_SYSTEM = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'user' and messages[0].role == 'system' and not loop.index0 == 1 %}"
    "{{ messages[0].content }}\n{% endif %}{{ m.content }}",
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS_REPLIES = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
KEEPS_THE_FIRST_USER = (
    "{% for m in messages %}{% if m.role == 'assistant' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
)
SHOUTS_LATER_REPLIES = CHATML.replace("{{ m.content }}", "{{ m.content | upper if loop.index0 == 3 else m.content }}")
# of the user messages only the newest is kept
FORGETS_USERS = (
    "{% for m in messages %}{% if m.role == 'assistant' or loop.last %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)

SPECIALS = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "qwen2": (QWEN2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    # here the tokenizer's end of sequence is not what ends a turn
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>"),
    "r1": (R1, ["<|User|>", "<|Assistant|>", "<|end|>"], "<|end|>"),
    "llama2": (LLAMA2, ["<s>", "</s>"], "</s>"),
}


def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one of the styles in ``SPECIALS``."""
    return byte_level(*SPECIALS[name])


def byte_level(template: str | None, specials: list[str], eos: str) -> PreTrainedTokenizerFast:
    """One token per byte and per special token; any text survives encoding and decoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, *specials])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, chat_template=template, clean_up_tokenization_spaces=False
    )
