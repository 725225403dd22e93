"""The policy as an ordinary Hugging Face checkpoint."""

import re
from pathlib import Path

from transformers import AutoTokenizer

from freshper_lightning.policy.net import PolicyNet

MODEL_FILES = re.compile(
    r"config\.json|generation_config\.json|(model|pytorch_model)[\w.-]*\.(safetensors|bin)(\.index\.json)?"
    r"|tokenizer[\w.]*|special_tokens_map\.json|added_tokens\.json|vocab\.\w+|merges\.txt|chat_template\.\w+"
)
"""What ``save_pretrained`` of models and tokenizers writes."""


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face checkpoint, and nothing else that replacing it would lose."""
    names = [path.name for path in folder.iterdir()]
    return "config.json" in names and all(MODEL_FILES.fullmatch(name) for name in names)


def export_policy(net: PolicyNet, source: str | Path, path: str | Path) -> None:
    """Write ``net`` as an ordinary Hugging Face checkpoint with float32 weights and the tokenizer of ``source``."""
    Path(path).mkdir(parents=True, exist_ok=True)
    net.model.save_pretrained(path, state_dict=dict(net.checkpoint_tensors()))
    AutoTokenizer.from_pretrained(source).save_pretrained(path)
