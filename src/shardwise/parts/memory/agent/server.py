"""Serves a node's snapshots to other nodes over HTTP, and receives their calls.

Other nodes send no data. They only call this node to do its part of a stage, or to persist a save.
All files are below the directory of the node. No name in a request can lead outside it, not even
through a link.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import math
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.local_files import open_regular
from shardwise.parts.memory.agent.metrics import CONTENT_TYPE, METRICS_PATH
from shardwise.parts.memory.files import (
    LARGEST_RECORD,
    PLAIN_NAME,
    decode_record,
    encode_record,
)
from shardwise.parts.memory.home import (
    ABANDONED_MARKER,
    Run,
    SnapshotDirectory,
    list_snapshots,
    open_below,
)
from shardwise.parts.memory.identity import METRICS_SCOPE, info_for_run, make_run_token
from shardwise.parts.memory.progress import read_progress
from shardwise.parts.memory.records import (
    PENDING,
    RESCUE,
    STAGES,
    Failing,
    Outcomes,
    PendingManifest,
    is_restored,
)
from shardwise.parts.memory.remote.calls import ReceivedCalls
from shardwise.parts.memory.states import (
    SaveStates,
    request_rescue,
)
from shardwise.parts.memory.times import (
    ANSWER_TIMEOUT,
    IDLE_CONNECTION_TIMEOUT,
    LONGEST_POLL_PAUSE,
    LONGEST_WAIT,
    SHUTDOWN_TIMEOUT,
    TRANSFER_TIMEOUT,
)

BACKLOG = 1024
MOST_CONNECTIONS = 1024
SEND_SIZE = 1 << 23
RUN_PATH = "/runs/{run:[0-9a-f]{16}}"
_NO_REGULAR_FILE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_STRANGERS = web.AppKey("strangers", dict[asyncio.Transport, None])
"""The connections over which no client has presented the secret yet, oldest first."""


def _is_defect(record: logging.LogRecord) -> bool:
    """Return False for errors that requests of invalid HTTP cause; all others are the agent's."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


log = logging.getLogger("shardwise.agent.requests")
log.addFilter(_is_defect)


@dataclass(frozen=True, slots=True)
class Served:
    """What an agent serves.

    Attributes:
        home: the node's directory, which contains the directory `runs`.
        token: the secret that every request must present.
        wake: called from the event loop when there may be work. It must not block.
        calls: the calls of other nodes.
        states: the states of the saves on the node.
        list_failing: returns what the agent fails to do. It must not block.
        list_metrics: returns the metrics of the node, for Prometheus.

    Raises:
        ValueError: the token is empty.
    """

    home: Path
    token: str
    wake: Callable[[], None]
    calls: ReceivedCalls = field(default_factory=ReceivedCalls)
    states: SaveStates = field(default_factory=SaveStates)
    list_failing: Callable[[], list[Failing]] = list
    list_metrics: Callable[[], str] = str

    def __post_init__(self) -> None:
        if not self.token:
            raise ValueError(
                "token='': pass a secret; without one, anybody could read the snapshots"
            )


def create_app(served: Served) -> web.Application:
    """Return the application that an agent serves."""
    handlers = _Handlers(served)
    app = web.Application(middlewares=[_require_token(served.token)])
    app[_STRANGERS] = {}
    app.router.add_get("/health", handlers.list_failing)
    app.router.add_get(METRICS_PATH, handlers.send_metrics)
    app.router.add_get(RUN_PATH, handlers.list_files)
    app.router.add_get(f"{RUN_PATH}/progress", handlers.list_progress)
    app.router.add_get(f"{RUN_PATH}/outcomes", handlers.list_outcomes)
    app.router.add_get(f"{RUN_PATH}/{{snapshot}}/{{name}}", handlers.send_file)
    app.router.add_post(f"{RUN_PATH}/{{snapshot}}/{{stage}}", handlers.call)
    app.on_response_prepare.append(_hide_versions)
    return app


@asynccontextmanager
async def serve_connections(
    app: web.Application,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    idle_timeout: float = IDLE_CONNECTION_TIMEOUT,
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
        lambda: _Acceptor(runner, most, min(ANSWER_TIMEOUT, idle_timeout)),
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else ANSWER_TIMEOUT,
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
    """Handles requests; some of them wait until there is an answer."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._outcomes: dict[Run, Outcomes] = {}
        self._pending: tuple[object, bytes] = (None, b"")
        self._pending_lock = asyncio.Lock()

    async def list_failing(self, request: web.Request) -> web.Response:
        return _json(self._served.list_failing())

    async def send_metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._served.list_metrics)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def list_progress(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(read_progress, self._run_of(request)))

    async def list_files(self, request: web.Request) -> web.Response:
        return _json(list_snapshots(self._served.home, request.match_info["run"]))

    async def list_outcomes(self, request: web.Request) -> web.Response:
        """Send the outcomes of a run's stages, as soon as their version is another one."""
        self._require_secret(request, "reading outcomes")
        known, states = _number_in(request, "version"), self._served.states
        async for _ in _attempts(request):
            if states.version != known:
                break
        run = self._run_of(request)
        found = self._outcomes.get(run)
        if found is None or found.version != states.version:
            found = await asyncio.to_thread(states.read_outcomes, run)
            self._outcomes = {run: found}
        return _json(msgspec.structs.replace(found, silence=states.silence(run)))

    async def call(self, request: web.Request) -> web.Response:
        """Have this node do its part of a stage, and reply when it is done, or after a while."""
        self._require_secret(request, "calling a node")
        served, place, stage = self._served, self._snapshot_of(request), request.match_info["stage"]
        if stage not in (*STAGES, RESCUE):
            raise web.HTTPBadRequest(text=f"{stage} is not one of {', '.join(STAGES)}, {RESCUE}")
        received = request.query.get("top", ""), _number_in(request, "patience")
        if stage == RESCUE and self._has(place) and place.has(PENDING):
            await asyncio.to_thread(request_rescue, served.states, place, received[0])
            served.wake()
            return web.Response(status=202)
        if stage == RESCUE:
            raise web.HTTPNotFound(text=f"this node has no pending manifest of {place.name}")
        async for _ in _attempts(request):
            if _is_discarded(place):
                raise web.HTTPGone
            if self._has(place):
                is_new = served.calls.call_of(place, stage) != received
                reply = served.calls.receive(place, stage, received)
                if reply is not None:
                    return web.Response(body=encode_record(reply))
                if is_new:
                    served.wake()
        if not self._has(place):
            raise web.HTTPNotFound(text=f"this node does not have {place.name} yet")
        return web.Response(status=202)

    async def send_file(self, request: web.Request) -> web.StreamResponse:
        place, name = self._snapshot_of(request), request.match_info["name"]
        if not re.match(PLAIN_NAME, name):
            raise web.HTTPBadRequest(text="the last part of the path is not a plain file name")
        knows_secret = _presents(request, self._served.token)
        if not knows_secret and not is_restored(name):
            raise web.HTTPForbidden(text=f"the token of a run does not allow reading {name}")
        file = _open_file(self._served.home, place.run.name, place.name, name)
        if file is None:
            raise web.HTTPNotFound
        with file:
            if name == PENDING:
                run = "" if knows_secret else place.run.name
                return web.Response(body=await self._read_pending(file, run))
            return await _send_file(request, file)

    async def _read_pending(self, file: BinaryIO, run: str) -> bytes:
        """Return what other nodes need of a pending manifest; the last one from memory."""
        status = os.fstat(file.fileno())
        version = status.st_ino, status.st_mtime_ns, status.st_size, run
        async with self._pending_lock:  # many nodes ask at once
            if self._pending[0] != version:
                body = await asyncio.to_thread(_encode_for_others, file, run)
                self._pending = version, body
            return self._pending[1]

    def _require_secret(self, request: web.Request, what: str) -> None:
        if not _presents(request, self._served.token):
            raise web.HTTPForbidden(text=f"the token of a run does not allow {what}")

    def _run_of(self, request: web.Request) -> Run:
        return Run(self._served.home / "runs" / request.match_info["run"])

    def _has(self, place: SnapshotDirectory) -> bool:
        """Return whether this node has a snapshot, not through a link."""
        with suppress(OSError), open_below(self._served.home, "runs", place.run.name, place.name):
            return True
        return False

    def _snapshot_of(self, request: web.Request) -> SnapshotDirectory:
        place = self._run_of(request).snapshot(request.match_info["snapshot"])
        if place is None:
            raise web.HTTPBadRequest(text="the path does not name the directory of a snapshot")
        return place


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


def _number_in(request: web.Request, name: str) -> float:
    """Return a number of the query, 0 by default."""
    try:
        number = float(request.query.get(name, "0"))
    except ValueError:
        number = -1.0
    if not 0.0 <= number < math.inf:
        raise web.HTTPBadRequest(text=f"{name}= must be a number, 0 or more")
    return number


async def _attempts(request: web.Request) -> AsyncIterator[None]:
    """Yield until the client waits no longer."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(_number_in(request, "wait"), LONGEST_WAIT)
    yield
    while (seconds_left := deadline - loop.time()) > 0 and not _is_closed(request):
        await asyncio.sleep(min(seconds_left, LONGEST_POLL_PAUSE))
        yield


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
            sent = await asyncio.wait_for(sending, TRANSFER_TIMEOUT)
        except (OSError, RuntimeError, asyncio.TimeoutError):  # RuntimeError: already closed
            sent = 0
        if sent == 0:
            transport.abort()
            return
        low += sent


def _encode_for_others(file: BinaryIO, run: str) -> bytes:
    """Return a pending manifest without the text of the manifest, which only its leader needs.

    Args:
        run: the run whose tokens replace the secrets of the agents; "" keeps the secrets.
    """
    size = min(os.fstat(file.fileno()).st_size, LARGEST_RECORD)
    try:
        pending = decode_record(file.read(size), PendingManifest, PENDING)
    except StoreError as error:
        raise web.HTTPInternalServerError(text=f"the record {PENDING} is damaged") from error
    nodes = [info_for_run(info, run) if run else info for info in pending.nodes]
    return encode_record(msgspec.structs.replace(pending, nodes=nodes, manifest=""))


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


def _is_discarded(place: SnapshotDirectory) -> bool:
    """Return whether this node has freed a snapshot, or is about to."""
    return place.has(ABANDONED_MARKER) or (not place.path.exists() and place.ended_path.exists())
