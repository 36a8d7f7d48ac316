"""Serves a node's snapshots to other nodes over HTTP, and receives their records.

All files are below one directory. No name in a request can lead outside it, by a link or otherwise.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shardwise.errors import FormatError
from shardwise.manifest.names import MANIFEST, checked_file, step_of_directory
from shardwise.memory.agent.connection_limits import UNAUTHENTICATED
from shardwise.memory.files import LARGEST_RECORD, replacing
from shardwise.memory.identity import run_token
from shardwise.memory.remote.client import LONGEST_WAIT, Health, ListedFile, ListedStep

LOOK_AROUND = 0.02
STALLED = 30.0
SLOWEST = 1 << 20
SLICE = 1 << 23
MOST_BODIES = LARGEST_RECORD
RUN = "/runs/{run:[0-9a-f]{16}}"
_ACCEPTED = re.compile(r"(pending-copy|(?!pending-|retain-)[a-z]+(-all)?)-[0-9a-f]{16}\.json")
"""The records that other nodes may write: requests and outcomes. All others are
written only by the trainers and the agent of this node."""
_LINK_OR_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENXIO)


def create_app(home: Path, token: str, wake: Callable[[], None]) -> web.Application:
    """Return the application that an agent serves.

    Args:
        home: the node's directory, which contains the directory `runs`.
        token: the secret that every request must present.
        wake: called from the event loop when there may be work; must not block.

    Raises:
        ValueError: the token is empty.
    """
    if not token:
        raise ValueError("the token is empty: without one, anybody could read the snapshots")
    handlers = _Handlers(home, wake)
    app = web.Application(middlewares=[_only_with(token)])
    app.router.add_get("/health", handlers.health)
    app.router.add_get(RUN, handlers.listing)
    app.router.add_get(f"{RUN}/{{step}}/{{name}}", handlers.file)
    app.router.add_put(f"{RUN}/{{step}}/{{name}}", handlers.record)
    app.router.add_post("/wake", handlers.woken)
    app.on_response_prepare.append(_say_little)
    return app


class _Handlers:
    """The request handlers, and the requests that wait for a file to appear."""

    def __init__(self, home: Path, wake: Callable[[], None]) -> None:
        self._home = home
        self._wake = wake
        self._arrival = asyncio.Event()
        self._bytes = 0

    async def health(self, request: web.Request) -> web.Response:
        with _directory(self._home, "runs") as runs:
            count = len(os.listdir(runs))
        return _json(Health(os.getpid(), count))

    async def listing(self, request: web.Request) -> web.Response:
        return _json(_steps(self._home, request.match_info["run"]))

    async def file(self, request: web.Request) -> web.StreamResponse:
        run, step, name = _place(request)
        loop = asyncio.get_running_loop()
        until = loop.time() + _wait(request)
        while (file := _open(self._home, run, step, name)) is None:
            left = until - loop.time()
            if left <= 0 or _is_gone(request):
                raise web.HTTPNotFound
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), min(left, LOOK_AROUND))
        with file:
            return await _send(request, file)

    async def record(self, request: web.Request) -> web.Response:
        run, step, name = _place(request)
        if name != MANIFEST and not _ACCEPTED.fullmatch(name):
            raise web.HTTPBadRequest(text="other nodes may not write a record of this name")
        async with self._body(request) as data:
            try:
                await asyncio.to_thread(_write, self._home, run, step, name, data)
            except OSError as error:
                text = f"cannot write the record: {error.strerror}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise web.HTTPInsufficientStorage(text=text) from error
                raise web.HTTPInternalServerError(text=text) from error
        return await self.woken(request)

    @asynccontextmanager
    async def _body(self, request: web.Request) -> AsyncIterator[bytearray]:
        """Return a request's body, which must have the stated length and fit into a record.

        The total of all bodies has a limit too; a client that exceeds it may try again later.
        """
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired
        if size > LARGEST_RECORD:
            raise web.HTTPRequestEntityTooLarge(max_size=LARGEST_RECORD, actual_size=size)
        body = bytearray()

        async def receive() -> None:
            while len(body) <= size:
                chunk = await asyncio.wait_for(request.content.readany(), STALLED)
                if not chunk:
                    return
                if self._bytes + len(chunk) > MOST_BODIES:
                    raise web.HTTPServiceUnavailable(
                        text="too many records are being received; try again later"
                    )
                self._bytes += len(chunk)
                body.extend(chunk)

        try:
            try:
                await asyncio.wait_for(receive(), STALLED + size / SLOWEST)
            except asyncio.TimeoutError as error:
                raise web.HTTPRequestTimeout from error
            except (ConnectionError, web.RequestPayloadError) as error:
                raise web.HTTPBadRequest(
                    text="the connection was closed before the end of the body"
                ) from error
            if len(body) != size:
                raise web.HTTPBadRequest(text=f"the body does not have the stated {size} bytes")
            yield body
        finally:
            self._bytes -= len(body)

    async def woken(self, request: web.Request) -> web.Response:
        arrival, self._arrival = self._arrival, asyncio.Event()
        arrival.set()
        self._wake()
        return web.Response(status=204)


def _only_with(token: str) -> Middleware:
    """Serve requests with the secret, and requests about one run with that run's token."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        said = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        run = request.match_info.get("run", "")
        of_run = f"Bearer {run_token(token, run)}".encode() if run else expected
        if not (hmac.compare_digest(said, expected) | hmac.compare_digest(said, of_run)):
            refusal = web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
            refusal.force_close()
            raise refusal
        request.app[UNAUTHENTICATED].remove(request.transport)
        return await handler(request)

    return check


async def _say_little(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "shardwise"


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _place(request: web.Request) -> tuple[str, str, str]:
    """Return run, step directory and file name of a request, each one plain path component."""
    info = request.match_info
    name = info["name"]
    try:
        if name != MANIFEST:
            checked_file(name)
    except FormatError as error:
        raise web.HTTPBadRequest(text="not a plain file name") from error
    if step_of_directory(info["step"]) is None:
        raise web.HTTPBadRequest(text="not a step directory")
    return info["run"], info["step"], name


def _wait(request: web.Request) -> float:
    try:
        wait = float(request.query.get("wait", "0"))
    except ValueError:
        wait = -1.0
    if not wait >= 0.0:
        raise web.HTTPBadRequest(text="wait must be a number of seconds")
    return min(wait, LONGEST_WAIT)


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _send(request: web.Request, file: BinaryIO) -> web.StreamResponse:
    """Send a file, or the requested range of it."""
    size = os.fstat(file.fileno()).st_size
    ranged = "Range" in request.headers
    try:
        low, high, _ = request.http_range.indices(size)
    except ValueError:
        low, high = size, size
    if ranged and low >= size:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    response = web.StreamResponse(status=206 if ranged else 200)
    response.content_type = "application/octet-stream"
    response.content_length = high - low
    response.headers["Accept-Ranges"] = "bytes"
    if ranged:
        response.headers["Content-Range"] = f"bytes {low}-{high - 1}/{size}"
    await response.prepare(request)
    if request.method != "HEAD":
        await _transmit(request, file, low, high)
    return response


async def _transmit(request: web.Request, file: BinaryIO, low: int, high: int) -> None:
    """Send bytes `low:high` of a file; close the connection if reading or sending fails."""
    loop = asyncio.get_running_loop()
    transport = request.transport
    while low < high and transport is not None:
        sending = loop.sendfile(transport, file, low, min(SLICE, high - low))
        try:
            sent = await asyncio.wait_for(sending, STALLED)
        except (OSError, RuntimeError, asyncio.TimeoutError):  # RuntimeError: already closed
            sent = 0
        if sent == 0:
            transport.abort()
            return
        low += sent


@contextmanager
def _directory(home: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open a directory below the home. None of the names may be a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with ExitStack() as stack:
        fd = os.open(home, flags)
        stack.callback(os.close, fd)
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=fd)
            fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            stack.callback(os.close, fd)
        yield fd


def _open(home: Path, run: str, step: str, name: str) -> BinaryIO | None:
    """Open a regular file; return None if there is none."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with _directory(home, "runs", run, step) as directory:
            fd = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in _LINK_OR_NOTHING:
            return None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb", buffering=0)


def _write(home: Path, run: str, step: str, name: str, data: bytearray) -> None:
    """Write a file atomically."""
    with (
        _directory(home, "runs", run, step, make=True) as directory,
        replacing(name, dir_fd=directory) as file,
    ):
        file.write(data)


def _steps(home: Path, run: str) -> list[ListedStep]:
    """Return the steps of a run in ascending order, with their regular, not hidden files."""
    found = []
    try:
        with _directory(home, "runs", run) as directory:
            names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        step = step_of_directory(name)
        if step is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                found.append(ListedStep(step, _files(home, run, name)))
    return sorted(found, key=lambda each: each.step)


def _files(home: Path, run: str, step: str) -> list[ListedFile]:
    files = []
    with _directory(home, "runs", run, step) as directory:
        for name in sorted(os.listdir(directory)):
            with suppress(FileNotFoundError, FormatError):
                if name != MANIFEST:
                    checked_file(name)
                facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    files.append(ListedFile(name, facts.st_size))
    return files
