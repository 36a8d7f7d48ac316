"""The proxy passes on every request unchanged, and injects each kind of fault."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault

CONTENT = bytes(range(256)) * 40


class _Handler(BaseHTTPRequestHandler):
    """Keeps what is put under each path, and reports the headers that it got."""

    protocol_version = "HTTP/1.1"
    stored: dict[str, bytes]
    hosts: list[str]

    def do_GET(self) -> None:
        body = self.stored.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", '"it"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")

    do_HEAD = do_GET  # noqa: N815 - the name that the class looks for

    def do_PUT(self) -> None:
        self.hosts.append(self.headers["Host"])
        self.stored[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def handler() -> type[_Handler]:
    return type("Handler", (_Handler,), {"stored": {"/a?b=%2F": CONTENT}, "hosts": []})


@pytest.fixture
def proxy(handler: type[_Handler]) -> Iterator[FaultProxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            yield proxy
    finally:
        server.shutdown()
        server.server_close()


def ask(
    proxy: FaultProxy, method: str, path: str, body: bytes | None = None, timeout: float = 10
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(
        urllib.parse.urlsplit(proxy.url).netloc, timeout=timeout
    )
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read()
    finally:
        connection.close()


def test_requests_pass_unchanged(proxy: FaultProxy, handler: type[_Handler]) -> None:
    status, headers, body = ask(proxy, "GET", "/a?b=%2F")
    assert (status, headers["etag"], body) == (200, '"it"', CONTENT)
    status, headers, body = ask(proxy, "HEAD", "/a?b=%2F")
    assert (status, headers["content-length"], body) == (200, str(len(CONTENT)), b"")
    assert ask(proxy, "PUT", "/new", CONTENT * 100)[0] == 201
    assert handler.stored["/new"] == CONTENT * 100
    assert handler.hosts == [urllib.parse.urlsplit(proxy.url).netloc]
    assert ask(proxy, "GET", "/missing")[0] == 404
    assert [(r.method, r.path, r.status, r.received, r.sent) for r in proxy.requests] == [
        ("GET", "/a?b=%2F", 200, 0, len(CONTENT)),
        ("HEAD", "/a?b=%2F", 200, 0, 0),
        ("PUT", "/new", 201, len(CONTENT) * 100, 0),
        ("GET", "/missing", 404, 0, 0),
    ]


def test_an_answer_is_injected_at_one_request(proxy: FaultProxy, handler: type[_Handler]) -> None:
    fault = HttpFault(FaultKind.ANSWER, 1, methods=("PUT",), status=503, retry_after=2)
    proxy.inject(fault)
    assert ask(proxy, "PUT", "/0", b"x")[0] == 201
    assert ask(proxy, "GET", "/a?b=%2F")[0] == 200  # does not count
    status, headers, _ = ask(proxy, "PUT", "/1", b"x")
    assert (status, headers["retry-after"]) == (503, "2")
    assert ask(proxy, "PUT", "/2", b"x")[0] == 201
    assert handler.stored.keys() == {"/a?b=%2F", "/0", "/2"}
    assert [request.fault for request in proxy.requests] == [None, None, fault, None]


@pytest.mark.parametrize(
    ("kind", "acted"), [(FaultKind.RESET, False), (FaultKind.LOSE_ANSWER, True)]
)
def test_a_reset_comes_before_or_after_the_server_acted(
    proxy: FaultProxy, handler: type[_Handler], kind: FaultKind, acted: bool
) -> None:
    proxy.inject(HttpFault(kind, path="new"))
    with pytest.raises(ConnectionResetError):
        ask(proxy, "PUT", "/new", b"x")
    assert ("/new" in handler.stored) == acted
    assert proxy.requests[0].status == (201 if acted else None)
    assert ask(proxy, "PUT", "/new", b"x")[0] == 201


def test_half_a_body_is_noticed_only_without_its_length(proxy: FaultProxy) -> None:
    proxy.inject(HttpFault(FaultKind.CUT_BODY), HttpFault(FaultKind.SHORTEN_BODY, 1))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy, "GET", "/a?b=%2F")
    assert caught.value.partial == CONTENT[:5120]
    assert ask(proxy, "GET", "/a?b=%2F")[2] == CONTENT[:5120]


def test_a_request_that_hangs_ends_with_the_timeout_of_the_client(proxy: FaultProxy) -> None:
    proxy.inject(HttpFault(FaultKind.HANG))
    with pytest.raises(TimeoutError):
        ask(proxy, "GET", "/a?b=%2F", timeout=0.2)
    assert ask(proxy, "GET", "/a?b=%2F")[2] == CONTENT


def test_a_body_comes_slowly(proxy: FaultProxy) -> None:
    proxy.inject(HttpFault(FaultKind.SLOW_BODY, bytes_per_second=20_000))
    begin = time.monotonic()
    assert ask(proxy, "GET", "/a?b=%2F")[2] == CONTENT
    assert time.monotonic() - begin > 0.4


def test_all_requests_fail_during_an_outage(proxy: FaultProxy) -> None:
    with proxy.outage():
        for _ in range(3):
            with pytest.raises(ConnectionError):
                ask(proxy, "GET", "/a?b=%2F")
    assert ask(proxy, "GET", "/a?b=%2F")[2] == CONTENT
    proxy.clear()
    assert proxy.requests == []


def test_a_server_that_is_down_is_a_bad_gateway() -> None:
    with FaultProxy("http://127.0.0.1:1") as proxy:
        assert ask(proxy, "GET", "/")[0] == 502


def test_bodies_of_all_connections_share_a_limit(handler: type[_Handler]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with FaultProxy(url, bytes_per_second=50_000) as proxy:
            begin = time.monotonic()
            threads = [
                threading.Thread(target=ask, args=(proxy, "PUT", f"/{i}", CONTENT))
                for i in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert time.monotonic() - begin > 0.35
    finally:
        server.shutdown()
        server.server_close()
