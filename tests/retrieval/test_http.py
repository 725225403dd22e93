import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from freshper_lightning.retrieval import Document, HTTPRetriever, RetrievalError, open_server
from freshper_lightning.retrieval import http as module

PAGE = {"document": {"id": "1", "contents": "Moon\nIt is grey."}, "score": 2.5}
GOOD = json.dumps({"result": [[PAGE, {"document": {"contents": "Mars\nIt is red."}}]]}).encode()


class Server(ThreadingHTTPServer):
    """A real server; ``script`` says what it does with its requests, one after the other, the last one for good."""

    daemon_threads = True

    def __init__(self, *script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script)
        self.requests, self.running, self.most_at_a_time = [], 0, 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/retrieve"

    def handle_error(self, request, client_address):
        """Clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        with server.lock:
            server.requests.append((self.path, self.headers["Content-Type"], json.loads(body)))
            act = server.script.pop(0) if len(server.script) > 1 else server.script[0]
            server.running += 1
            server.most_at_a_time = max(server.most_at_a_time, server.running)
        try:
            act(self)
        finally:
            with server.lock:
                server.running -= 1

    def say(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def says(body, status=200, after=0.0):
    def act(handler):
        time.sleep(after)
        handler.say(body, status)

    return act


def drips(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(GOOD)))
    handler.end_headers()
    for byte in GOOD:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.05)


def hangs_up(handler):
    handler.close_connection = True
    handler.connection.close()


def breaks_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(GOOD)))
    handler.end_headers()
    handler.wfile.write(GOOD[:20])
    handler.close_connection = True


@pytest.fixture
def serve():
    servers = []

    def start(*script):
        servers.append(Server(*script))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def retriever(server, **options):
    return HTTPRetriever(server.url, **{"timeout": 10, "attempts": 3, "backoff": 0.01, **options})


def test_a_query_is_asked_and_answered_in_the_protocol_of_search_r1(serve):
    server = serve(says(GOOD))
    found = retriever(server).search("what is 月?", 3)
    assert found == [Document("Moon\nIt is grey.", 2.5), Document("Mars\nIt is red.", None)]
    asked = {"queries": ["what is 月?"], "topk": 3, "return_scores": True}
    assert server.requests == [("/retrieve", "application/json", asked)]


def test_more_documents_than_asked_for_are_cut_and_none_is_an_answer(serve):
    server = serve(says(GOOD), says(b'{"result": [[]]}'))
    assert [document.title for document in retriever(server).search("moon", 1)] == ["Moon"]
    assert retriever(server).search("moon", 1) == []


GARBAGE = [
    b"",
    b"<html>502</html>",
    b"[]",
    b"5",
    b"\xff\xfe",
    b'{"result": []}',
    b'{"result": null}',
    b'{"result": [[], []]}',
    b'{"result": [{"document": 5}]}',
    b'{"result": [["page"]]}',
    b'{"result": [[{"document": {"contents": 5}, "score": 1}]]}',
    b'{"result": [[{"document": {"contents": "a"}, "score": "high"}]]}',
    b'{"results": [[]]}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("reply", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_a_failure_of_the_retriever_and_not_an_empty_result(serve, reply):
    server = serve(says(reply))
    with pytest.raises(RetrievalError, match="failed in 2 attempts: not a reply to one query"):
        retriever(server, attempts=2).search("moon", 1)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("passing", "options", "message"),
    [
        (says(b"busy", 503), {}, "status 503: busy"),
        (says(b"slow down", 429), {}, "status 429"),
        (says(GOOD, after=1.5), {"timeout": 0.5}, "ReadTimeoutError"),
        (drips, {"timeout": 0.5}, "not complete in time"),
        (hangs_up, {}, "ProtocolError"),
        (breaks_off, {}, "(IncompleteRead|ProtocolError)"),
        (says(GARBAGE[1]), {}, "not a reply"),
    ],
)
def test_what_may_pass_is_tried_again_and_given_up_after_the_last_attempt(serve, passing, options, message):
    server = serve(passing, says(GOOD))
    assert retriever(server, **options).search("moon", 1)[0].title == "Moon"
    assert len(server.requests) == 2
    with pytest.raises(RetrievalError, match=message):
        retriever(serve(passing), attempts=1, **options).search("moon", 1)


def test_a_refused_request_is_not_repeated(serve):
    server = serve(says(b"no such index", 404))
    with pytest.raises(RetrievalError, match="refuses the request with status 404: no such index"):
        retriever(server).search("moon", 1)
    assert len(server.requests) == 1


def test_nobody_at_the_address_is_a_failure_in_bounded_time(serve):
    server = serve(says(GOOD))
    server.shutdown()
    server.server_close()
    start = time.monotonic()
    with pytest.raises(RetrievalError, match="failed in 3 attempts"):
        retriever(server).search("moon", 1)
    assert time.monotonic() - start < 5


def test_a_reply_without_end_is_not_read_to_its_end(serve, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    with pytest.raises(RetrievalError, match="more than 1000 bytes"):
        retriever(serve(says(b" " * 200_000)), attempts=1).search("moon", 1)


def test_the_pause_doubles_between_attempts(serve, monkeypatch):
    pauses, server = [], serve(says(b"", 500))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    with pytest.raises(RetrievalError, match="failed in 4 attempts: status 500"):
        retriever(server, attempts=4, backoff=0.1).search("moon", 1)
    assert pauses == pytest.approx([0.1, 0.2, 0.4])


def test_threads_share_the_limit_of_concurrent_queries(serve):
    server = serve(says(GOOD, after=0.05))
    shared = retriever(server, concurrency=3, timeout=5)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda number: shared.search(str(number), 1), range(24)))
    assert len(found) == 24
    assert server.most_at_a_time == 3


def test_one_retriever_per_server_and_settings_in_a_process():
    url = "http://127.0.0.1:9/retrieve"
    assert open_server(url, (("timeout", 1.0),)) is open_server(url, (("timeout", 1.0),))
    assert open_server(url, (("timeout", 1.0),)) is not open_server(url, (("timeout", 2.0),))


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "server='localhost:8000' must be an address"),
        ("ftp://host/retrieve", {}, "must be an address"),
        ("http://host", {"timeout": 0}, r"^timeout=0 must be in \(0, 86400\] seconds$"),
        ("http://host", {"timeout": float("inf")}, r"^timeout=inf must be in \(0"),
        ("http://host", {"timeout": float("nan")}, r"^timeout=nan must be in \(0"),
        ("http://host", {"timeout": "30"}, r"^timeout='30' must be in \(0"),
        ("http://host", {"backoff": -1}, r"^backoff=-1 must be in \[0, 86400\] seconds$"),
        ("http://host", {"backoff": float("inf")}, r"^backoff=inf must be in \[0"),
        ("http://host", {"attempts": 0}, "^attempts=0 must be a whole number of at least 1$"),
        ("http://host", {"attempts": 1.5}, r"^attempts=1\.5 must be"),
        ("http://host", {"attempts": float("inf")}, "^attempts=inf must be"),
        ("http://host", {"concurrency": 2.5}, r"^concurrency=2\.5 must be"),
        ("http://host", {"concurrency": True}, "^concurrency=True must be"),
    ],
)
def test_settings_out_of_range_are_refused(url, options, message):
    with pytest.raises(ValueError, match=message):
        HTTPRetriever(url, **options)
