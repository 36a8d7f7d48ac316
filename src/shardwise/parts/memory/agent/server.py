"""Serves a node's snapshots to other nodes over HTTP, and receives their records.

All files are below the directory of the node. No name in a request can lead outside it, not even
through a link.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import MANIFEST, step_of_directory
from shardwise.kernel.store.local_files import open_regular, write_atomically
from shardwise.parts.memory.agent.metrics import CONTENT_TYPE, METRICS_PATH
from shardwise.parts.memory.files import (
    LARGEST_RECORD,
    PLAIN_NAME,
    decode_record,
    encode_record,
)
from shardwise.parts.memory.home import Run, list_steps, open_below
from shardwise.parts.memory.identity import METRICS_SCOPE, info_for_run, make_run_token
from shardwise.parts.memory.progress import read_progress
from shardwise.parts.memory.records import PendingManifest, is_restored, pending_records
from shardwise.parts.memory.remote.client import LONGEST_WAIT
from shardwise.parts.memory.view import Failing

BACKLOG = 1024
MOST_CONNECTIONS = 1024
FIRST_REQUEST_TIMEOUT, HANDSHAKE_TIMEOUT = 5.0, 5.0
IDLE_TIMEOUT = 90.0
SHUTDOWN_TIMEOUT = 2.0
POLL_PERIOD = 0.02
STALL_TIMEOUT = 30.0
SLOWEST_RATE = 1 << 20
SEND_SIZE = 1 << 23
MOST_BODY_BYTES = LARGEST_RECORD
RUN_PATH = "/runs/{run:[0-9a-f]{16}}"
_WRITABLE = re.compile(r"(pending-copy|(?!pending-|retain-)[a-z]+(-all)?)-[0-9a-f]{16}\.json")
"""The records that other nodes may write: requests, outcomes and copies of pending manifests. Only
the trainers and the agent of this node write the other records."""
_NO_REGULAR_FILE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_STRANGERS = web.AppKey("strangers", dict[asyncio.Transport, None])
"""The connections over which no client has presented the secret yet, oldest first."""


def _is_defect(record: logging.LogRecord) -> bool:
    """Return False for errors that requests of invalid HTTP cause; all others are the agent's."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


log = logging.getLogger("shardwise.agent.requests")
log.addFilter(_is_defect)


def create_app(
    home: Path,
    token: str,
    wake: Callable[[], None],
    list_failing: Callable[[], list[Failing]] = list,
    list_metrics: Callable[[], str] = str,
) -> web.Application:
    """Return the application that an agent serves.

    Args:
        home: the node's directory, which contains the directory `runs`.
        token: the secret that every request must present.
        wake: called from the event loop when there may be work. It must not block.
        list_failing: returns what the agent fails to do. It must not block.
        list_metrics: returns the metrics of the node, for Prometheus.

    Raises:
        ValueError: the token is empty.
    """
    if not token:
        raise ValueError("token='': pass a secret; without one, anybody could read the snapshots")
    handlers = _Handlers(home, token, wake, list_failing, list_metrics)
    app = web.Application(middlewares=[_require_token(token)])
    app[_STRANGERS] = {}
    app.router.add_get("/health", handlers.list_failing)
    app.router.add_get(METRICS_PATH, handlers.send_metrics)
    app.router.add_get(RUN_PATH, handlers.list_files)
    app.router.add_get(f"{RUN_PATH}/progress", handlers.list_progress)
    app.router.add_get(f"{RUN_PATH}/{{step}}/{{name}}", handlers.send_file)
    app.router.add_put(f"{RUN_PATH}/{{step}}/{{name}}", handlers.receive_record)
    app.on_response_prepare.append(_hide_versions)
    return app


@asynccontextmanager
async def serve_connections(
    app: web.Application,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    idle_timeout: float = IDLE_TIMEOUT,
    most: int = MOST_CONNECTIONS,
) -> AsyncIterator[None]:
    """Serve an application while the block runs.

    Anybody can open connections. So a connection is closed after a few seconds, unless its client
    has presented the secret. If half of the connections are waiting for this, the oldest of these
    is closed: clients that know the secret present it immediately.

    Args:
        listener: the listening socket. It is closed at the end.
        tls: certificate and key for https; None for http.
        idle_timeout: a connection is closed if no complete request arrives on it for so many
            seconds.
        most: the largest number of connections.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=log,
        keepalive_timeout=idle_timeout,
        lingering_time=SHUTDOWN_TIMEOUT,
        auto_decompress=False,
        shutdown_timeout=SHUTDOWN_TIMEOUT,
    )
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(
        lambda: _Acceptor(runner, most, min(FIRST_REQUEST_TIMEOUT, idle_timeout)),
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT,
    )
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


class _Acceptor(asyncio.Protocol):
    """Passes each new connection to the server, or closes it if there are too many."""

    def __init__(self, runner: web.AppRunner, most: int, timeout: float) -> None:
        self._runner, self._most, self._timeout = runner, most, timeout

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept or close a new connection."""
        server = self._runner.server
        if server is None or not isinstance(transport, asyncio.Transport):
            raise TypeError(f"{transport!r} is not a connection, or the server has not begun")
        strangers = self._runner.app[_STRANGERS]
        is_full = len(server.connections) >= self._most
        if strangers and (is_full or len(strangers) >= self._most // 2):
            self._close_stranger(next(iter(strangers)))
        elif is_full:
            transport.abort()
            return
        strangers[transport] = None
        asyncio.get_running_loop().call_later(self._timeout, self._close_stranger, transport)
        handler = server()
        transport.set_protocol(handler)
        handler.connection_made(transport)

    def _close_stranger(self, transport: asyncio.Transport) -> None:
        """Close a connection over which nobody has presented the secret."""
        strangers = self._runner.app[_STRANGERS]
        if transport in strangers:
            del strangers[transport]
            transport.abort()


class _Handlers:
    """Handles requests; some of them wait until a file appears."""

    def __init__(
        self,
        home: Path,
        token: str,
        wake: Callable[[], None],
        list_failing: Callable[[], list[Failing]],
        list_metrics: Callable[[], str],
    ) -> None:
        self._home = home
        self._token = token
        self._list_metrics = list_metrics
        self._wake = wake
        self._list_failing = list_failing
        self._bytes_received = 0

    async def list_failing(self, request: web.Request) -> web.Response:
        return _json(self._list_failing())

    async def send_metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._list_metrics)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def list_progress(self, request: web.Request) -> web.Response:
        run = Run(self._home / "runs" / request.match_info["run"])
        return _json(await asyncio.to_thread(read_progress, run))

    async def list_files(self, request: web.Request) -> web.Response:
        return _json(list_steps(self._home, request.match_info["run"]))

    async def send_file(self, request: web.Request) -> web.StreamResponse:
        run, step, name = _path_of(request)
        knows_secret = _presents(request, self._token)
        if not knows_secret and not is_restored(name):
            raise web.HTTPForbidden(text=f"the token of a run does not allow reading {name}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _requested_wait(request)
        while (file := _open_file(self._home, run, step, name)) is None:
            seconds_left = deadline - loop.time()
            if seconds_left <= 0 or _is_closed(request):
                raise web.HTTPNotFound
            await asyncio.sleep(min(seconds_left, POLL_PERIOD))
        with file:
            if not knows_secret and pending_records([name]):
                return web.Response(body=await asyncio.to_thread(_without_secrets, file, run, name))
            return await _send_file(request, file)

    async def receive_record(self, request: web.Request) -> web.Response:
        run, step, name = _path_of(request)
        if name != MANIFEST and not _WRITABLE.fullmatch(name):
            raise web.HTTPBadRequest(text=f"other nodes may not write the record {name}")
        async with self._receive_body(request) as data:
            try:
                await asyncio.to_thread(_write_record, self._home, run, step, name, data)
            except OSError as error:
                text = f"cannot write the record {name} of {step}: {error.strerror or error}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise web.HTTPInsufficientStorage(text=text) from error
                raise web.HTTPInternalServerError(text=text) from error
        self._wake()
        return web.Response(status=204)

    @asynccontextmanager
    async def _receive_body(self, request: web.Request) -> AsyncIterator[bytearray]:
        """Receive the body of a request, and yield it.

        The body must have the length that the header states, and at most `LARGEST_RECORD` bytes.
        The sum of all bodies that are being received is limited to `MOST_BODY_BYTES`. If a body
        does not fit, the client gets status 503 and can try again later.
        """
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired
        if size > LARGEST_RECORD:
            raise web.HTTPRequestEntityTooLarge(max_size=LARGEST_RECORD, actual_size=size)
        body = bytearray()

        async def receive() -> None:
            async for chunk in request.content.iter_any():
                if self._bytes_received + len(chunk) > MOST_BODY_BYTES:
                    raise web.HTTPServiceUnavailable(
                        text="too many records are being received; try again later"
                    )
                self._bytes_received += len(chunk)
                body.extend(chunk)

        try:
            try:
                await asyncio.wait_for(receive(), STALL_TIMEOUT + size / SLOWEST_RATE)
            except asyncio.TimeoutError as error:
                raise web.HTTPRequestTimeout from error
            except (ConnectionError, web.RequestPayloadError) as error:
                raise web.HTTPBadRequest(
                    text=f"the connection was closed after {len(body)} of {size} bytes of the body"
                ) from error
            if len(body) != size:
                raise web.HTTPBadRequest(
                    text=f"the body has {len(body)} bytes; the header states {size}"
                )
            yield body
        finally:
            self._bytes_received -= len(body)


def _require_token(token: str) -> Middleware:
    """Return a middleware that serves only requests with a valid token.

    The secret is valid for all requests. The token of a run is valid only for reading that run,
    without the secrets in its records: everybody who can read the run's root can read the token.
    The token for metrics is valid only for these: the server that collects them knows it.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        run = request.match_info.get("run", "") if request.method in ("GET", "HEAD") else ""
        if request.path == METRICS_PATH:
            run = METRICS_SCOPE
        of_run = make_run_token(token, run) if run else token
        if not (_presents(request, token) | _presents(request, of_run)):
            refusal = web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
            refusal.force_close()
            raise refusal
        if request.transport is not None:
            request.app[_STRANGERS].pop(request.transport, None)
        return await handler(request)

    return check


def _presents(request: web.Request, token: str) -> bool:
    """Return whether a request has this token."""
    received = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    return hmac.compare_digest(received, f"Bearer {token}".encode())


async def _hide_versions(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "shardwise"


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _path_of(request: web.Request) -> tuple[str, str, str]:
    """Return run, step directory and file name of a request; each is a single path component."""
    info = request.match_info
    if not re.match(PLAIN_NAME, info["name"]):
        raise web.HTTPBadRequest(text="the last part of the path is not a plain file name")
    if step_of_directory(info["step"]) is None:
        raise web.HTTPBadRequest(text="the path does not name the directory of a step")
    return info["run"], info["step"], info["name"]


def _requested_wait(request: web.Request) -> float:
    try:
        wait = float(request.query.get("wait", "0"))
    except ValueError:
        wait = -1.0
    if not wait >= 0.0:
        raise web.HTTPBadRequest(text="wait= must be a number of seconds, 0 or more")
    return min(wait, LONGEST_WAIT)


def _is_closed(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _send_file(request: web.Request, file: BinaryIO) -> web.StreamResponse:
    """Send a file, or the requested byte range of it."""
    size = os.fstat(file.fileno()).st_size
    is_range = "Range" in request.headers
    try:
        low, high, _ = request.http_range.indices(size)
    except ValueError:
        low, high = size, size
    if is_range and low >= size:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    response = web.StreamResponse(status=206 if is_range else 200)
    response.content_type = "application/octet-stream"
    response.content_length = high - low
    response.headers["Accept-Ranges"] = "bytes"
    if is_range:
        response.headers["Content-Range"] = f"bytes {low}-{high - 1}/{size}"
    await response.prepare(request)
    if request.method != "HEAD":
        await _send_bytes(request, file, low, high)
    return response


async def _send_bytes(request: web.Request, file: BinaryIO, low: int, high: int) -> None:
    """Send the bytes `low:high` of a file. Close the connection if reading or sending fails."""
    loop = asyncio.get_running_loop()
    transport = request.transport
    while low < high and transport is not None:
        sending = loop.sendfile(transport, file, low, min(SEND_SIZE, high - low))
        try:
            sent = await asyncio.wait_for(sending, STALL_TIMEOUT)
        except (OSError, RuntimeError, asyncio.TimeoutError):  # RuntimeError: already closed
            sent = 0
        if sent == 0:
            transport.abort()
            return
        low += sent


def _without_secrets(file: BinaryIO, run: str, name: str) -> bytes:
    """Return a pending manifest, with a token of the run in place of each agent's secret."""
    size = min(os.fstat(file.fileno()).st_size, LARGEST_RECORD)
    try:
        pending = decode_record(file.read(size), PendingManifest, name)
    except StoreError as error:
        raise web.HTTPInternalServerError(text=f"the record {name} is damaged") from error
    nodes = [info_for_run(info, run) for info in pending.nodes]
    return encode_record(msgspec.structs.replace(pending, nodes=nodes))


def _open_file(home: Path, run: str, step: str, name: str) -> BinaryIO | None:
    """Open a regular file; return None if it does not exist, or is something else."""
    try:
        with open_below(home, "runs", run, step) as directory:
            return os.fdopen(open_regular(name, dir_fd=directory), "rb", buffering=0)
    except StoreError:  # not a regular file
        return None
    except OSError as error:
        if error.errno in _NO_REGULAR_FILE_ERRORS:
            return None
        raise


def _write_record(home: Path, run: str, step: str, name: str, data: bytearray) -> None:
    """Write a record atomically, and create its directory."""
    with (
        open_below(home, "runs", run, step, make=True) as directory,
        write_atomically(name, dir_fd=directory) as file,
    ):
        file.write(data)
