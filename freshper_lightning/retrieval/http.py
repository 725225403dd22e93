"""A retriever behind HTTP, in the protocol of Search-R1's servers."""

import json
import logging
import threading
import time
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from freshper_lightning.errors import require_count, require_setting
from freshper_lightning.retrieval.protocol import Document, RetrievalError, optional_package

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
"""Largest reply that is read."""

CHUNK = 2**16

MAX_SECONDS = 86_400
"""Longest time that can be set, a day; a socket would refuse infinity only in the middle of a run."""


class HTTPRetriever:
    """Asks a server that speaks the protocol of Search-R1 (Jin et al. 2025); a failure is never an empty result.

    Request: ``POST {"queries": [query], "topk": k, "return_scores": true}``. Reply: ``{"result": [[{"document":
    {"contents": text}, "score": number}, ...]]}``, one inner list per query; the score may be missing. Threads may
    search at the same time. What may pass (no connection, no reply in time, status 429 or 5xx, a reply that is not of
    this form) is tried again; other statuses are final.

    Args:
        url: Address of the retrieval end point.
        timeout: Seconds that one attempt may take, up to twice as many where the server stalls in its reply; above 0.
        attempts: Tries per query, at least 1.
        backoff: Seconds before the second try, doubled before each further one.
        concurrency: Most queries at the server at a time, from this process, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self, url: str, timeout: float = 30.0, attempts: int = 3, backoff: float = 0.5, concurrency: int = 64
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"server={url!r} must be an address such as http://host:8000/retrieve")
        allowed = f"{MAX_SECONDS}] seconds"
        require_setting("timeout", repr(timeout), _in_seconds(timeout) and timeout > 0, f"in (0, {allowed}")
        require_setting("backoff", repr(backoff), _in_seconds(backoff), f"in [0, {allowed}")
        require_count("attempts", attempts)
        require_count("concurrency", concurrency)
        self.url, self.timeout, self.attempts, self.backoff = url, timeout, attempts, backoff
        self._urllib3 = optional_package("urllib3", f"server={url!r}")
        self._pool = self._urllib3.PoolManager(maxsize=concurrency)
        self._slots = threading.BoundedSemaphore(concurrency)

    def search(self, query: str, top_k: int) -> list[Document]:
        """The server's documents, in its order.

        Raises:
            RetrievalError: Every attempt failed, or the server refuses the request; the last failure is the cause.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return self._ask(query, top_k)
            except _PassingError as error:
                if attempt == self.attempts:
                    raise RetrievalError(f"{self.url} failed in {attempt} attempts: {error}") from error
                log.warning("%s: attempt %d failed: %s", self.url, attempt, error)
                time.sleep(self.backoff * 2 ** (attempt - 1))
        raise AssertionError("there is at least one attempt")

    def _ask(self, query: str, top_k: int) -> list[Document]:
        body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        with self._slots:
            status, reply = self._post(body)
        if status != 200:
            message = f"status {status}: {reply[:200].decode(errors='replace')}"
            if status == 429 or status >= 500:
                raise _PassingError(message)
            raise RetrievalError(f"{self.url} refuses the request with {message}")
        return _read(reply)[:top_k]

    def _post(self, body: str) -> tuple[int, bytes]:
        """Status and body of the reply, read before the deadline."""
        deadline = time.monotonic() + self.timeout
        try:
            response = self._pool.request(
                "POST",
                self.url,
                body=body,
                headers={"Content-Type": "application/json"},
                timeout=self._urllib3.Timeout(total=self.timeout),
                retries=False,
                preload_content=False,
            )
            try:
                return int(response.status), _drain(response, deadline)
            finally:
                response.close()
        except self._urllib3.exceptions.HTTPError as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from error


def _in_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS


class _PassingError(Exception):
    """A failure of one attempt that another attempt may not have."""


def _drain(response: Any, deadline: float) -> bytes:
    received = bytearray()
    while chunk := response.read1(CHUNK):
        received += chunk
        if len(received) > MAX_BYTES:
            raise _PassingError(f"a reply of more than {MAX_BYTES} bytes")
        if time.monotonic() > deadline:
            raise _PassingError(f"the reply is not complete in time, {len(received)} bytes so far")
    return bytes(received)


def _read(reply: bytes) -> list[Document]:
    """The documents of a reply to one query."""
    try:
        (found,) = json.loads(reply)["result"]
        return [Document(_contents(item), _score(item.get("score"))) for item in found]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        shown = reply[:200].decode(errors="replace")
        raise _PassingError(f"not a reply to one query: {shown!r} ({type(error).__name__}: {error})") from error


def _contents(item: dict[str, Any]) -> str:
    contents = item["document"]["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents must be text, not {type(contents).__name__}")
    return contents


def _score(score: Any) -> float | None:
    return None if score is None else float(score)


@cache
def open_server(url: str, options: tuple[tuple[str, Any], ...]) -> HTTPRetriever:
    """The retriever of a server, made once per process and settings, so that all share its limit of concurrency."""
    return HTTPRetriever(url, **dict(options))
