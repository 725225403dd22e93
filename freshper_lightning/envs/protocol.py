"""What an environment must be to be played by a language model, and how one is made from its id."""

import difflib
import importlib
import inspect
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import gymnasium
from gymnasium.envs.registration import EnvCreator, EnvSpec, VectorEnvCreator, load_env_creator
from gymnasium.spaces import Text

TextEnv: TypeAlias = gymnasium.Env[str, str]
"""An environment whose observation is the next user message and whose action is the policy's whole reply, as text.

``reset(seed=...)`` fixes the instance, all of its randomness included: equal seeds and replies give equal episodes.
A reply that cannot be parsed is an ordinary step with ``valid`` false and never an exception. Keys of ``info``, all of
them optional:

* ``system`` (str, of ``reset``): system prompt of the conversation.
* ``valid`` (bool, default true): the reply could be parsed.
* ``effective`` (bool, default that of ``valid``): the reply changed the state.
* ``success`` (bool, default unknown): the verdict, read at the last step.
* ``scores`` (numbers by name, default none): what else an evaluation is to report the mean of.

An environment that draws from a finite set has ``instances``, a frozenset of strings that name all of them, so that
training and evaluation can be kept apart; one that generates them keeps seeds of different parity apart by itself.
"""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReplySpace(Text):
    """Every string, the empty one included: what a policy may say is not the environment's to limit.

    Samples are printable ASCII of at most ``max_length`` characters.
    """

    def __init__(self, max_length: int = 64) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string."""
        return isinstance(x, str)


def tagged_answer(reply: str, longest: int) -> str | None:
    """What stands in the one ``<answer>...</answer>`` of ``reply``, without the white space around it.

    No tag, several of them, nothing inside, or more than ``longest`` characters are ``None``.
    """
    found = _ANSWER.findall(reply)
    if len(found) != 1 or reply.count("<answer>") != 1:
        return None
    answer = str(found[0]).strip()
    return answer if 0 < len(answer) <= longest else None


def parse_answer(reply: str, actions: Iterable[str]) -> str | None:
    """The action named in the one ``<answer>...</answer>`` of ``reply``, spelled as in ``actions``.

    Surrounding white space and case do not matter; anything but exactly one known name is ``None``.
    """
    named = tagged_answer(reply, len(reply))
    return next((action for action in actions if named is not None and action.casefold() == named.casefold()), None)


def make_text_env(env_id: str, kwargs: Mapping[str, Any]) -> TextEnv:
    """Make the registered gymnasium environment ``env_id`` (or ``module:id``) after checking that it speaks text.

    Raises:
        ValueError: The id is not registered, an argument is not one of the environment's or of another type than its
            constructor says, or a space is not text.
    """
    check_arguments(env_id, kwargs)
    env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    for name, space in ((name, getattr(env, name, None)) for name in ("observation_space", "action_space")):
        if not isinstance(space, Text):
            env.close()
            raise ValueError(
                f"environment {env_id} has {name} {space}; it must be a gymnasium.spaces.Text, because observations "
                "are user messages and actions are replies (wrap the environment to write and read text)"
            )
    return env


def check_arguments(env_id: str, kwargs: Mapping[str, Any]) -> EnvSpec:
    """The registration of ``env_id``, whose constructor takes ``kwargs``.

    Raises:
        ValueError: The id is not registered, or an argument is not one of the environment's or of another type than
            its constructor says.
    """
    spec = find_spec(env_id)
    creator = creator_of(spec)
    try:
        inspect.signature(creator).bind(**{**spec.kwargs, **kwargs})
    except TypeError as error:
        allowed = ", ".join(inspect.signature(creator).parameters) or "none"
        raise ValueError(f"environment {env_id} cannot be made: {error}; its arguments are: {allowed}") from error
    _check_types(env_id, creator, kwargs)
    return spec


_PLAIN: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    bool: (bool,),
    str: (str,),
    type(None): (type(None),),
}
"""What a config file may give for an annotation."""


def _check_types(env_id: str, creator: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a value of another type than the constructor's annotation, as far as that is made of plain types."""
    try:
        hints = get_type_hints(creator.__init__ if inspect.isclass(creator) else creator)
    except (
        NameError,
        TypeError,
        AttributeError,
        SyntaxError,
    ):  # an annotation that only its author's type checker can read
        return
    defaults = {name: parameter.default for name, parameter in inspect.signature(creator).parameters.items()}
    for name, value in kwargs.items():
        if value is None and defaults.get(name, ...) is None:  # text: str = None
            continue
        hint = hints.get(name)
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(option in _PLAIN for option in options) and not any(_fits(value, option) for option in options):
            allowed = " or ".join("null" if option is type(None) else option.__name__ for option in options)
            raise ValueError(f"environment {env_id} cannot be made: {name}={value!r} must be of type {allowed}")


def _fits(value: object, option: type) -> bool:
    return isinstance(value, _PLAIN[option]) and (option is bool or not isinstance(value, bool))


def find_spec(env_id: str) -> EnvSpec:
    """The registration of ``env_id``, of which ``module:Name-v0`` imports the module first.

    Raises:
        ValueError: The module cannot be imported, or the id is not registered.
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"environment id {env_id!r}: module {module!r} cannot be imported ({error})") from error
    except gymnasium.error.Error as error:
        raise ValueError(_unknown(name)) from error


def creator_of(spec: EnvSpec) -> EnvCreator | VectorEnvCreator:
    """What makes the environment, mostly its class.

    Raises:
        ValueError: The registration names nothing.
    """
    if spec.entry_point is None:
        raise ValueError(f"environment {spec.id} is registered without an entry_point")
    return load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point


def _unknown(env_id: str) -> str:
    known = sorted(gymnasium.registry)
    near = difflib.get_close_matches(env_id, known, n=3, cutoff=0.5)
    named = near or [name for name in known if name.startswith("freshper/")]
    return (
        f"environment id {env_id!r} is not registered; did you mean {' or '.join(named)}? "
        "(an id of the form module:Name-v0 imports the module that registers it)"
    )


def takes_argument(env_id: str, name: str) -> bool:
    """Whether ``name`` is one of the arguments of the registered environment ``env_id``.

    Raises:
        ValueError: The id is not registered.
    """
    parameters = inspect.signature(creator_of(find_spec(env_id))).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def spoken(turns: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What a tokenizer sees of a demonstration.

    Messages come apart, headed by their role on a line of its own, as templates in the style of ChatML show them;
    the head of a reply comes alone, because it is part of the prompt.
    """
    for observation, reply in turns:
        yield f"user\n{observation}"
        yield "assistant\n"
        yield reply
