"""The policy as an ordinary Hugging Face checkpoint."""

from pathlib import Path

from transformers import AutoTokenizer

from freshper_lightning.policy.net import PolicyNet


def export_policy(net: PolicyNet, source: str | Path, path: str | Path) -> None:
    """Write ``net`` as an ordinary Hugging Face checkpoint with float32 weights and the tokenizer of ``source``."""
    Path(path).mkdir(parents=True, exist_ok=True)
    net.model.save_pretrained(path, state_dict=dict(net.checkpoint_tensors()))
    AutoTokenizer.from_pretrained(source).save_pretrained(path)
