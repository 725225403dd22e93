"""What the command line says to a wrong key or value: a few lines with the key, the value and what is allowed."""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

MOST_SHOWN = 16
"""Longest list of alternatives; of a longer one only those with a similar name are shown."""

_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS_PATH = re.compile(r"class_path[ =]'([\w.]+)'")
_UNKNOWN = re.compile(
    r"(?:(?:Group '(?P<group>[\w.]+)'|Subcommand '\w+') does not accept option|Option) '(?P<option>[\w.]+)'"
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_EXPECTED = re.compile(
    r"Expected a (typing\.Literal\[.*?\]|<class '[\w.]+'>|[\w.]+\[.*?\])(?:\. Got value: (.*?)(?:\. Got value: .*)?$)?",
    re.MULTILINE,
)
_GIVEN = re.compile(r"Given value: (?:NestedArg\(key='[\w.]+', val=)?(.*?)\)?$", re.MULTILINE)
_REFUSED = re.compile(r"^ *- (?!Expected a )(.*)$", re.MULTILINE)
_WORD = re.compile(r"'(\w+)'(?=[,\]])")
_TYPE = re.compile(r"(?!collections\.|typing\.)\b[a-z_]\w*(?:\.\w+)+")


HELP = "`{0} --help` lists the keys, `--data.help ReplayDataModule` and `--model.algorithm.help GRPO` those of a class."


class FreshperParser(LightningArgumentParser):
    """Ends with exit code 2 and one short message where the parser of Lightning prints pages of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what :func:`explain` makes of the message, and end the process."""
        if not self.exit_on_error:  # a parser inside another, which adds the key and the class
            super().error(message, ex)
        parser: ArgumentParser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        sys.stderr.write(f"freshper: error: {explain(message, _types(parser))}\n{HELP.format(program)}\n")
        self.exit(2)

    @override
    def parse_path(self, path: str | PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """A file of a stack that does not hold keys is refused by its name, which the parser does not give."""
        try:
            with Path(path).open(encoding="utf-8") as file:
                found = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self.error(f"{path} is not a YAML file: {error}")
        if not isinstance(found, dict):
            self.error(f"{path} must hold keys and their values, not {found!r}")
        parsed: Namespace = super().parse_path(path, *args, **kwargs)
        return parsed


def _types(parser: ArgumentParser) -> dict[str, str]:
    """The type of each key as text; those of the subcommands where the parser only chooses one of them."""
    types: dict[str, str] = {}
    for action in parser._actions:
        for subparser in action.choices.values() if isinstance(action.choices, dict) else ():
            types |= _types(subparser)
        types[action.dest] = str(getattr(action, "_typehint", ""))
    return types


def explain(message: str, types: dict[str, str]) -> str:
    """The parser's message in the words of a user of the keys in ``types``, which gives the type of each as text."""
    key = ".".join(_KEY.findall(message))
    value = next(iter(_GIVEN.findall(message)), "")
    if message.startswith("unrecognized arguments: "):
        return _unknown_key(message.split()[2].lstrip("-").split("=")[0], types)
    if unknown := _UNKNOWN.search(message):
        return _unknown_option(key, unknown, _CLASS_PATH.findall(message), types)
    if named := _UNKNOWN_CLASS.search(message):
        inner = _hint(key, _CLASS_PATH.findall(message))
        if "Tensor" in inner:  # a learning rate of PyTorch's optimizers; no text is one
            return f"{key}={named.group(1)} must be {' or '.join(k for k in inner.split(' | ') if 'Tensor' not in k)}"
        hint = inner or f"{message}\n{types.get(key, '')}"
        words = [word for kind, _ in _EXPECTED.findall(message) for word in _WORD.findall(kind)]
        return _unknown_class(key, named.group(1), hint, words)
    if expected := _EXPECTED.findall(message):
        allowed = [_plain(kind) for kind, _ in expected if kind != "<class 'NoneType'>"]
        if inner := _hint(key, _CLASS_PATH.findall(message)):  # not what might stand in the place of its class
            allowed = [_plain(inner)]
        value = next((got for _, got in expected if got), value)
        if not any(allowed):
            return f"{key}={value} is not the import path of a class that can be imported"
        return f"{key}={value} must be {' or '.join(dict.fromkeys(allowed))}"
    return _KEY.sub(r"\1", refusal(message))


def refusal(message: str) -> str:
    """The sentence of the part that refused a value, without the list of the types that the parser tried."""
    sentences = _REFUSED.findall(message) if "Subtypes: " in message else []
    return sentences[-1] if sentences else message


def _unknown_option(key: str, unknown: re.Match[str], class_paths: list[str], types: dict[str, str]) -> str:
    option = unknown["option"]
    if not class_paths:
        return _unknown_key(f"{unknown['group']}.{option}" if unknown["group"] else option, types)
    cls = _imported(class_paths[-1])
    if cls is None:
        return _unknown_key(f"{key}.{option}", types)
    allowed = [name for name in inspect.signature(cls).parameters if name not in ("params", "args", "kwargs")]
    return f"{key}.{option} is not a setting of {cls.__name__}; {_alternatives(option, allowed)}"


def _unknown_key(key: str, known: Iterable[str]) -> str:
    key = key.replace(".init_args", "")
    parent = key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == parent and name != "help"]
    near = difflib.get_close_matches(key, [*known, *siblings], n=3)
    if near:
        return f"there is no key {key}; did you mean {' or '.join(dict.fromkeys(near))}?"
    return f"there is no key {key}; {_alternatives(key, siblings or [name for name in known if '.' not in name])}"


def _hint(key: str, class_paths: list[str]) -> str:
    """Type of the setting ``key`` of the innermost class that the message names, as text."""
    owner = _imported(class_paths[-1]) if class_paths else None
    parameters = inspect.signature(owner).parameters if owner is not None else {}
    name = key.rpartition(".")[2]
    return str(parameters[name].annotation) if name in parameters else ""


def _unknown_class(key: str, value: str, text: str, words: list[str]) -> str:
    bases = [cls for cls in map(_imported, _TYPE.findall(text.rpartition("Subtypes: ")[2])) if cls is not None]
    names = sorted({sub.__name__ for base in bases for sub in _concrete_subclasses(base)})
    allowed = _alternatives(value, [*dict.fromkeys(words), *names])
    return f"{key}={value} is not a class that is known; {allowed}, or the import path of another"


def _alternatives(given: str, allowed: list[str]) -> str:
    shown = allowed if len(allowed) <= MOST_SHOWN else difflib.get_close_matches(given, allowed, n=5, cutoff=0.4)
    return f"allowed: {', '.join(shown or allowed[:MOST_SHOWN])}"


def _imported(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _concrete_subclasses(base: type) -> set[type]:
    found: set[type] = set()
    children: list[type] = type.__subclasses__(base)
    for cls in children:
        found |= _concrete_subclasses(cls)
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            found.add(cls)
    return found


def _plain(kind: str) -> str:
    """``<class 'int'>`` as ``int``, ``typing.Literal['a', 'b']`` as ``one of a, b``."""
    if kind.startswith("typing.Literal"):
        return "one of " + kind.removeprefix("typing.Literal[").removesuffix("]").replace("'", "")
    return kind.removeprefix("<class '").removesuffix("'>").removeprefix("collections.abc.")
