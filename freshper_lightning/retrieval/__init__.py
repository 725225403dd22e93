"""Retrieval for search tasks: BM25 in this process or a server, usable alone; needs the extra ``search``."""

from freshper_lightning.retrieval.bm25 import BM25Retriever, build_index, is_index, open_index
from freshper_lightning.retrieval.http import HTTPRetriever, open_server
from freshper_lightning.retrieval.protocol import Document, RetrievalError, Retriever

__all__ = [
    "BM25Retriever",
    "Document",
    "HTTPRetriever",
    "RetrievalError",
    "Retriever",
    "build_index",
    "is_index",
    "open_index",
    "open_server",
]
