"""Tiny language models and their tokenizers, written to disk as ordinary Hugging Face checkpoints."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, START, END)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_MULTIPLE = 64

Family = Literal["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3"]
CONFIGS: dict[Family, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "smollm3": SmolLM3Config,
}


@dataclass(frozen=True)
class TinySpec:
    """Architecture of a tiny decoder; the defaults give about one million parameters.

    Raises:
        ValueError: The sizes do not divide each other or the family is unknown; the message names the field.
    """

    family: Family = "llama"
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 384
    tied: bool = True
    """Whether the input embedding is the output head."""
    max_position: int = 1024
    """Longest sequence, in tokens."""
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        if self.family not in CONFIGS:
            raise ValueError(f"family must be one of {', '.join(CONFIGS)}, not {self.family!r}")
        for name in ("hidden_size", "layers", "heads", "kv_heads", "intermediate", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_size % self.heads:
            raise ValueError(f"heads must divide hidden_size {self.hidden_size}, not {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads {self.heads}, not {self.kv_heads}")


def byte_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte (256) and three special tokens; any text survives encoding and decoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(tokenizer, chat_template)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, isolate: str, chat_template: str = CHATML
) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which no merge crosses the border of a match of ``isolate``; any text survives it.

    What matches the regular expression ``isolate`` (map cells, actions, digits) is cut out before merges are learned
    and applied, so that its tokens do not depend on what stands beside it, while fixed prose merges into long tokens.
    ``texts`` may be whole rendered conversations: special tokens in them are cut out as well.

    Raises:
        ValueError: ``vocab_size`` leaves no room for the bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} (bytes and special tokens), not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(isolate), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    special = re.compile("|".join(re.escape(token) for token in SPECIALS))
    tokenizer.train_from_iterator((piece for text in texts for piece in special.split(text)), trainer)
    return _wrap(tokenizer, chat_template)


def _wrap(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def build_tiny(path: str | Path, spec: TinySpec, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a freshly initialised float32 model and its tokenizer to the folder ``path``.

    Equal ``spec`` and vocabulary give equal weights; global random state is left as it was. The vocabulary is padded
    to a multiple of 64 rows, and generation stops at the tokenizer's end-of-sequence token. For ``qwen2`` read the
    tokenizer back with ``PreTrainedTokenizerFast``: ``AutoTokenizer`` forces Qwen2's own splitting upon that family.
    """
    config = _config(spec, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    Path(path).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _config(spec: TinySpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return CONFIGS[spec.family](
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden_size // spec.heads,
        intermediate_size=spec.intermediate,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
