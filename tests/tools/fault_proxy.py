"""An HTTP proxy for fault tests. It counts requests, and makes chosen requests fail."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import aiohttp
import yarl
from aiohttp import web

CHUNK = 1 << 16
MAX_HANG = 600.0  # seconds
START_TIMEOUT = 30.0  # seconds
# Headers that apply to one connection only. A proxy does not pass them on.
_HOP_BY_HOP_HEADERS = {"connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding"}
_HEADERS_ADDED_BY_AIOHTTP = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class FaultKind(Enum):
    """What happens to a request."""

    ANSWER = "the proxy answers with an error; the server sees nothing"
    RESET = "the connection is reset; the server sees nothing"
    HANG = "no answer comes; the server sees nothing"
    LOSE_ANSWER = "the server executes the request, but the connection is reset, without an answer"
    CUT_BODY = "the connection ends after half of the answer's body"
    SHORTEN_BODY = "half of the answer's body comes, with a Content-Length that fits it"
    SLOW_BODY = "the answer's body comes slowly"


@dataclass(frozen=True, slots=True)
class HttpFault:
    """A fault to inject into some requests.

    If an answer has no body, `CUT_BODY`, `SHORTEN_BODY` and `SLOW_BODY` do not change it.

    Args:
        kind: the kind of fault.
        index: the index of the first matching request that fails, counted from 0.
        count: the number of matching requests that fail, from `index` on; None for all.
        methods: methods that match, such as `PUT`; all if empty.
        path: a regular expression. A request matches if its path and query contain a match.
        status: the status of `ANSWER`.
        retry_after: the seconds in the `Retry-After` header of `ANSWER`; None for no such header.
        text: the body of `ANSWER`.
        bytes_per_second: the rate of `SLOW_BODY`.
    """

    kind: FaultKind
    index: int = 0
    count: int | None = 1
    methods: tuple[str, ...] = ()
    path: str = ""
    status: int = 500
    retry_after: int | None = None
    text: str = "injected by a test\n"
    bytes_per_second: float = 1000

    def matches(self, method: str, path: str) -> bool:
        """Return whether a request with this method and path matches."""
        return (not self.methods or method in self.methods) and bool(re.search(self.path, path))

    def includes(self, index: int) -> bool:
        """Return whether the matching request with this index fails."""
        return self.index <= index and (self.count is None or index < self.index + self.count)


@dataclass(slots=True)
class ProxiedRequest:
    """A request that reached the proxy.

    Attributes:
        method: its method.
        path: its path and query, as sent.
        fault: the fault that was injected; None if there was none.
        status: the status of the server's answer; None if the server did not answer.
        received: bytes of the request's body that the proxy read.
        sent: bytes of the answer's body that the proxy sent.
    """

    method: str
    path: str
    fault: HttpFault | None
    status: int | None = None
    received: int = 0
    sent: int = 0


class FaultProxy:
    """A proxy on loopback in front of an HTTP server. It runs in a thread of this process.

    It passes on all headers, including `Host`. A client that signs its requests signs the proxy's
    address, and the server verifies this address.

    Example:

        with FaultProxy("http://127.0.0.1:5000") as proxy:
            proxy.inject(HttpFault(FaultKind.LOSE_ANSWER, methods=("PUT",), path="manifest"))
            store = open_store(f"s3://bucket/run?endpoint={proxy.url}")

    Args:
        target: URL of the server, without a path.
        bytes_per_second: a limit on the bytes of bodies that pass through the proxy, of all
            connections together and in both directions; None for no limit.

    Attributes:
        url: URL of the proxy.
        requests: all requests so far.
        max_concurrent_requests: the largest number of requests at the same time, so far.
    """

    def __init__(self, target: str, *, bytes_per_second: float | None = None) -> None:
        self.url = ""
        self.requests: list[ProxiedRequest] = []
        self.max_concurrent_requests = 0
        self._concurrent_requests = 0
        self._target = target.rstrip("/")
        self._throttle = _Throttle(bytes_per_second)
        self._counts: dict[HttpFault, int] = {}  # for each fault, the number of matching requests
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT) or not self.url:
            raise RuntimeError(
                f"the proxy of {self._target} did not start within {START_TIMEOUT:.0f} s: see "
                "stderr for a traceback of the thread `fault-proxy`"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT)

    def inject(self, *faults: HttpFault) -> None:
        """Add faults. If several faults include a request, the first one is injected.

        If a fault is added again, its count of requests begins at 0 again.
        """
        with self._lock:
            self._counts.update((fault, 0) for fault in faults)

    def clear(self) -> None:
        """Remove all faults, and forget all requests."""
        with self._lock:
            self._counts.clear()
            self.requests.clear()
            self.max_concurrent_requests = 0

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Reset all requests while a block runs."""
        fault = HttpFault(FaultKind.RESET, count=None)
        self.inject(fault)
        try:
            yield
        finally:
            with self._lock:
                self._counts.pop(fault, None)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._count_and_handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        # Keep no idle connections: if the server closed one, this would look like a fault.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=MAX_HANG)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = "http://{}:{}".format(*runner.addresses[0])
                self._started.set()
                await self._stop.wait()
            finally:
                await runner.cleanup()

    def _record(self, request: web.Request) -> ProxiedRequest:
        """Record a request, and choose its fault."""
        method, path = request.method, request.raw_path
        chosen = None
        with self._lock:
            for fault, count in self._counts.items():
                if fault.matches(method, path):
                    self._counts[fault] = count + 1
                    if chosen is None and fault.includes(count):
                        chosen = fault
            record = ProxiedRequest(method, path, chosen)
            self.requests.append(record)
        return record

    async def _count_and_handle(self, request: web.Request) -> web.StreamResponse:
        self._concurrent_requests += 1
        self.max_concurrent_requests = max(self.max_concurrent_requests, self._concurrent_requests)
        try:
            return await self._handle(request)
        finally:
            self._concurrent_requests -= 1

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        record = self._record(request)
        fault = record.fault
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.RESET:
            return _reset(request)
        if kind is FaultKind.HANG:
            await asyncio.sleep(MAX_HANG)
            return _reset(request)
        if fault is not None and kind is FaultKind.ANSWER:
            async for _ in self._body(request, record):
                pass
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            return web.Response(status=fault.status, headers=headers, text=fault.text)
        try:
            return await self._forward(request, record)
        except aiohttp.ClientConnectorError as error:  # the server is down
            return web.Response(status=502, text=f"{error}\n")
        except (aiohttp.ClientError, ConnectionError):  # the server or client closed the connection
            return _reset(request)

    async def _forward(self, request: web.Request, record: ProxiedRequest) -> web.StreamResponse:
        kind = record.fault.kind if record.fault is not None else None
        async with self._session.request(
            request.method,
            yarl.URL(self._target + request.raw_path, encoded=True),
            headers=[(k, v) for k, v in request.headers.items() if _is_passed_on(k)],
            data=self._body(request, record) if request.body_exists else None,
            skip_auto_headers=_HEADERS_ADDED_BY_AIOHTTP,
            allow_redirects=False,
        ) as answer:
            record.status = answer.status
            if kind is FaultKind.LOSE_ANSWER:
                await answer.read()
                return _reset(request)
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if _is_passed_on(name):
                    response.headers.add(name, value)
            if kind in (FaultKind.CUT_BODY, FaultKind.SHORTEN_BODY) and request.method != "HEAD":
                return await _send_half(request, response, await answer.read(), record)
            slow_body = _Throttle(
                record.fault.bytes_per_second
                if record.fault is not None and kind is FaultKind.SLOW_BODY
                else None
            )
            await response.prepare(request)
            size = 256 if kind is FaultKind.SLOW_BODY else CHUNK
            async for chunk in answer.content.iter_chunked(size):
                await slow_body.wait_for_bytes(len(chunk))
                await self._throttle.wait_for_bytes(len(chunk))
                await response.write(chunk)
                record.sent += len(chunk)
            await response.write_eof()
            return response

    async def _body(self, request: web.Request, record: ProxiedRequest) -> AsyncIterator[bytes]:
        async for chunk in request.content.iter_chunked(CHUNK):
            await self._throttle.wait_for_bytes(len(chunk))
            record.received += len(chunk)
            yield chunk


class _Throttle:
    """Delays data, so that the rate stays below a limit. If the limit is None, nothing waits."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._busy_until = 0.0

    async def wait_for_bytes(self, count: int) -> None:
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._busy_until = max(self._busy_until, now) + count / self._rate
        await asyncio.sleep(self._busy_until - now)


def _is_passed_on(header: str) -> bool:
    return header.lower() not in _HOP_BY_HOP_HEADERS


async def _send_half(
    request: web.Request, response: web.StreamResponse, body: bytes, record: ProxiedRequest
) -> web.StreamResponse:
    cut = record.fault is not None and record.fault.kind is FaultKind.CUT_BODY and body != b""
    half = body[: len(body) // 2]
    response.content_length = len(body) if cut else len(half)
    await response.prepare(request)
    await response.write(half)
    record.sent += len(half)
    if cut:
        # A reset could discard bytes that were already sent. A regular close does not.
        if request.transport is not None:
            request.transport.close()
    else:
        await response.write_eof()
    return response


def _reset(request: web.Request) -> web.Response:
    """Reset the connection of a request. Return a response for aiohttp, which never reaches it."""
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        if connection is not None:
            linger = struct.pack("ii", 1, 0)  # closing discards unsent data, and sends a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        request.transport.abort()
    return web.Response()
