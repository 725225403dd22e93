"""Run as a program: answers the questions of a checker's process, one at a time, over a connection.

Called with a file, a file descriptor and seconds. The file defines ``check``, which gives a verdict, and ``EXAMPLE``,
arguments of a check that is right. Nothing of this package is imported, so that a process starts fast and stays small.
"""

import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType

UNFIT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)
"""What a check raises for an answer of a shape that it does not expect, which is a wrong answer."""


def serve(connection: Connection, seconds: float, check: Callable[..., bool]) -> None:
    """Answer each tuple of arguments with a verdict, or with the text of an exception, until the other end is closed.

    Answers are JSON, which cannot run anything where they are read. The process ends by itself where a check still
    runs long after ``seconds``, and so when nobody waits for it.
    """
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        try:
            verdict: bool | str = bool(check(*question))
        except UNFIT:
            verdict = False
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(verdict).encode())


def load(path: str) -> ModuleType:
    """The module that the file at ``path`` defines; its folder stays off ``sys.path``, for its neighbour math.py."""
    spec = importlib.util.spec_from_file_location("checks", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, descriptor: str, seconds: str) -> None:
    """Load the checks, try them on their example, say so, and serve.

    Raises:
        RuntimeError: The example is not right.
    """
    logging.disable(logging.CRITICAL)
    checks, connection = load(path), Connection(int(descriptor))
    if not checks.check(*checks.EXAMPLE):
        raise RuntimeError(f"{path} gives its example {checks.EXAMPLE} a wrong verdict")
    connection.send_bytes(json.dumps(True).encode())
    serve(connection, float(seconds), checks.check)


if __name__ == "__main__":
    main(*sys.argv[1:])
