"""What a retriever is: a query in, the best documents out."""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol


class RetrievalError(OSError):
    """A retriever could not do its work; says nothing about the query, and is never an empty result."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document as the corpus has it: the first line is the title and the rest is the text."""

    contents: str
    score: float | None = None
    """Relevance to the query, on the retriever's own scale, where it gives one."""

    @property
    def title(self) -> str:
        """First line, without the quotation marks of Wikipedia dumps."""
        return self.contents.partition("\n")[0].strip().strip('"')

    @property
    def text(self) -> str:
        """Everything below the title."""
        return self.contents.partition("\n")[2].strip()


class Retriever(Protocol):
    """Finds documents; equal queries give equal documents as long as the corpus stays the same."""

    def search(self, query: str, top_k: int) -> list[Document]:
        """At most ``top_k`` documents, best first.

        Raises:
            RetrievalError: The retriever failed.
        """


def optional_package(name: str, needed_by: str) -> Any:
    """Import a package of the extra ``search``.

    Raises:
        ValueError: It is not installed; the message says what needs it and how to get it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{needed_by} needs the package {name}: pip install -e '.[search]'") from error
