"""BM25 over a JSONL corpus, with an index on disk that processes share through memory maps."""

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from freshper_lightning.jsonl import read_jsonl
from freshper_lightning.replacing import replacing
from freshper_lightning.retrieval.protocol import Document, optional_package

DOCUMENTS, OFFSETS = "documents.npy", "offsets.npy"
"""UTF-8 bytes of all documents, one after the other; where each begins, and where the last one ends."""

WORD = r"(?u)\b\w+\b"

_INDEX_FILE = re.compile(rf"{DOCUMENTS}|{OFFSETS}|\w+(\.csc)?\.index\.(json|npy)")
"""Names of our files and of those that bm25s writes."""


def build_index(corpus: str | Path, path: str | Path, text_field: str = "contents", title_field: str = "") -> int:
    """Index every row of a JSONL file and return their number; an index that is there is replaced once all is written.

    The index holds the documents, so that the corpus is not needed any more. Building takes the memory of the
    tokenised corpus; opening takes that of the vocabulary.

    Args:
        corpus: JSONL file.
        path: Folder of the index: one that is not there, is empty or holds an index and nothing else.
        text_field: Holds the document; its first line is the title, as in the corpora of Search-R1.
        title_field: Holds the title where it stands apart, empty where it does not.

    Raises:
        ValueError: The corpus cannot be read, has no words, or has a row without one of the fields; or the folder holds
            something else, or cannot be written.
    """
    if Path(corpus).resolve().is_relative_to(Path(path).resolve()):
        raise ValueError(f"corpus={str(corpus)!r} must not be inside path={str(path)!r}, which is replaced")
    with replacing(path, is_index, "an index") as folder:
        documents = list(_documents(corpus, text_field, title_field))
        _indexed(documents, corpus).save(folder, show_progress=False)
        encoded = [document.encode() for document in documents]
        np.save(folder / DOCUMENTS, np.frombuffer(b"".join(encoded), dtype=np.uint8))
        np.save(folder / OFFSETS, np.cumsum([0, *map(len, encoded)], dtype=np.int64))
    return len(documents)


def is_index(folder: Path) -> bool:
    """Whether a folder holds what :func:`build_index` writes, and nothing else."""
    names = {path.name for path in folder.iterdir()}
    return {DOCUMENTS, OFFSETS} <= names and all(map(_INDEX_FILE.fullmatch, names))


def _indexed(documents: list[str], corpus: str | Path) -> Any:
    if not documents:
        raise ValueError(f"corpus={str(corpus)!r} holds no documents")
    tokens = _tokens(documents)
    if not any(tokens):
        raise ValueError(f"corpus={str(corpus)!r} has no word in its {len(documents)} documents; one must have one")
    index = _bm25s().BM25(backend="numpy")
    index.index(tokens, show_progress=False)
    return index


def _documents(corpus: str | Path, text_field: str, title_field: str) -> Iterator[str]:
    fields = [field for field in (title_field, text_field) if field]
    for number, row in enumerate(read_jsonl(corpus, "corpus"), start=1):
        for field in fields:
            if not isinstance(row.get(field), str):
                raise ValueError(
                    f"corpus={str(corpus)!r}: row {number} has no text in field {field!r}; it has {', '.join(row)}"
                )
        yield "\n".join(row[field] for field in fields).encode(errors="replace").decode()


def _bm25s() -> Any:
    package = optional_package("bm25s", "a BM25 index")
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG, and says so on every run
    return package


def _tokens(texts: list[str]) -> Any:
    return _bm25s().tokenize(texts, token_pattern=WORD, stopwords=None, show_progress=False, return_ids=False)


class BM25Retriever:
    """Ranks by BM25 (Lucene's variant, Robertson et al. 1995); ties go to the document that comes first in the corpus.

    Only documents that share a word with the query are found. Scores and documents are memory maps that all processes
    share; threads may search at the same time.

    Raises:
        ValueError: The folder is not an index.
    """

    def __init__(self, folder: str | Path) -> None:
        if not (Path(folder) / OFFSETS).is_file():
            raise ValueError(f"index={str(folder)!r} is not an index; `freshper index` makes one from a JSONL corpus")
        self.index: Any = _bm25s().BM25.load(folder, mmap=True)
        self.documents = np.load(Path(folder) / DOCUMENTS, mmap_mode="r")
        self.offsets = np.load(Path(folder) / OFFSETS, mmap_mode="r")

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    def search(self, query: str, top_k: int) -> list[Document]:
        """The documents of highest score, best first."""
        words = self.index.get_tokens_ids(_tokens([query])[0])
        if not words:
            return []
        scores = self.index.get_scores_from_ids(words)
        kth = np.partition(scores, -top_k)[-top_k] if top_k < len(scores) else 0.0
        found = np.flatnonzero((scores >= kth) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:top_k]
        return [Document(self._contents(int(number)), float(scores[number])) for number in best]

    def _contents(self, number: int) -> str:
        return bytes(self.documents[self.offsets[number] : self.offsets[number + 1]]).decode()


@cache
def open_index(folder: str) -> BM25Retriever:
    """The index in ``folder``, opened once per process."""
    return BM25Retriever(folder)
