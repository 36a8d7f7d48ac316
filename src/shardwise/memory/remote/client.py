"""HTTP client of a node's agent: small requests, and byte ranges read straight into memory.

Trainers use it too, so it needs only the standard library's HTTP.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from errno import EINPROGRESS
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec

from shardwise.errors import StoreError
from shardwise.manifest.names import step_directory
from shardwise.memory.files import LARGEST_RECORD
from shardwise.memory.records import AgentInfo
from shardwise.store.store import Buffer

LONGEST_WAIT = 60.0
LARGEST_ANSWER = 1 << 26
LONGEST_EXPLANATION = 500
PLAIN_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z"
_RUN = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(PLAIN_NAME)
_TOKEN = re.compile(r"[!-~]{1,512}")
SYN_AGAIN, LOOK = 0.2, 0.05
_HUNG_UP = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Health(msgspec.Struct, frozen=True):
    """A running agent: its process, and the number of runs for which it stores something."""

    pid: int
    runs: Count


class ListedFile(msgspec.Struct, frozen=True):
    """A file on a node, and its size in bytes."""

    name: Annotated[str, msgspec.Meta(pattern=PLAIN_NAME)]
    size: Count


class ListedStep(msgspec.Struct, frozen=True):
    """The files of a step on a node."""

    step: Count
    files: list[ListedFile]


class AgentClient:
    """A client of one agent. Threads may share it; each request uses a connection of its own.

    Args:
        info: the agent's URL and token.
        connect_timeout: seconds until a node that does not accept a connection counts as lost.
        read_timeout: seconds until a node that sends nothing counts as lost.
        tls: the TLS context for an https URL. An http URL is then refused.

    Every method raises `StoreError` if the agent is unreachable, sends nothing, or refuses.

    Raises:
        StoreError: the URL or the token of `info` is invalid.
    """

    def __init__(
        self,
        info: AgentInfo,
        *,
        connect_timeout: float = 5.0,
        read_timeout: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._where = f"node {info.node} ({info.url})"
        self._host, self._port, secure = _address(info)
        self._secure, self._tls = secure, tls
        if not _TOKEN.fullmatch(info.token):
            raise StoreError(f"{self._where}: its info has no valid token")
        self._headers = {"Authorization": f"Bearer {info.token}"}
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._closed = self._aborted = False

    def __str__(self) -> str:
        return self._where

    def close(self) -> None:
        """Close idle connections. Requests in progress complete normally."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def abort(self) -> None:
        """Make requests in progress and all later ones fail at once. Any thread may call this."""
        with self._lock:
            self._aborted = True
            for connection in self._busy:
                with suppress(OSError, TypeError):  # closed meanwhile
                    # SSLSocket.shutdown would make other threads read ciphertext.
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        self.close()

    def health(self) -> Health:
        """Return the health of the agent."""
        return self._ask("GET", "/health", lambda response: self._decode(response, Health))

    def list(self, run: str) -> list[ListedStep]:
        """Return the files of a run on the node, by ascending step; empty if there are none."""
        return self._ask(
            "GET",
            _path(run),
            lambda response: self._decode(response, list[ListedStep]),
        )

    def read(self, run: str, step: int, name: str, *, limit: int, wait: float = 0.0) -> bytes:
        """Return the contents of a small file.

        Args:
            limit: the largest size to accept, in bytes.
            wait: seconds to wait for the file to appear; at most 60.

        Raises:
            FileNotFoundError: the node does not have the file.
            StoreError: the file is larger than `limit`.
        """
        wait = min(max(wait, 0.0), LONGEST_WAIT)
        path = _path(run, step, name) + (f"?wait={wait:.3f}" if wait else "")
        return self._ask("GET", path, lambda response: self._all(response, limit), wait=wait)

    def read_range_into(self, run: str, step: int, name: str, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes of a file from `offset`.

        Raises:
            FileNotFoundError: the node does not have the file.
            StoreError: the file ends earlier.
        """
        if len(out) == 0:
            return
        wanted = f"{offset}-{offset + len(out) - 1}"

        def take(response: HTTPResponse) -> None:
            got = response.headers.get("Content-Range", "").removeprefix("bytes ").split("/")[0]
            if response.status != 206 or got != wanted or response.length != len(out):
                raise StoreError(
                    f"{self}: requested bytes {wanted} of {name}, received {got or 'no range'}"
                )
            view = out.data
            while view:
                count = response.readinto(view)
                if count == 0:
                    done = len(out) - len(view)
                    raise StoreError(
                        f"{self}: connection closed after {done} bytes of {wanted} of {name}"
                    )
                view = view[count:]

        self._ask("GET", _path(run, step, name), take, headers={"Range": f"bytes={wanted}"})

    def size(self, run: str, step: int, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: the node does not have the file.
        """

        def take(response: HTTPResponse) -> int:
            said = response.headers.get("Content-Length", "")
            response.read()
            if not (said.isascii() and said.isdigit() and len(said) < 20):
                raise StoreError(f"{self}: the response does not give the size of {name}")
            return int(said)

        return self._ask("HEAD", _path(run, step, name), take)

    def put(self, run: str, step: int, name: str, data: bytes) -> None:
        """Write a record atomically on the node, and wake the agent.

        Raises:
            StoreError: the record is larger than 256 MiB, or the node has no space for it.
        """
        if len(data) > LARGEST_RECORD:
            raise StoreError(f"{self}: {name} has {len(data):,} bytes; at most {LARGEST_RECORD:,}")
        self._ask("PUT", _path(run, step, name), HTTPResponse.read, body=data)

    def wake(self) -> None:
        """Make the agent look for work."""
        self._ask("POST", "/wake", HTTPResponse.read, body=b"")

    def _ask(
        self,
        method: str,
        path: str,
        take: Callable[[HTTPResponse], T],
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        wait: float = 0.0,
    ) -> T:
        """Send a request, and return the result of `take`, which reads the response to its end."""
        asked = f"{self}: {method} {path}"
        connection: HTTPConnection | None = None
        response: HTTPResponse | None = None
        try:
            everything = {**self._headers, **(headers or {})}
            patience = self._read_timeout + wait
            connection, is_new = self._connected()
            try:
                response = _exchange(connection, method, path, everything, body, patience)
            except _HUNG_UP:
                if is_new:
                    raise
                self._give_back(connection, None)  # the agent closed the idle connection
                connection = self._connect()
                response = _exchange(connection, method, path, everything, body, patience)
            if response.status not in (200, 204, 206):
                raise _refusal(asked, response)
            return take(response)
        except (StoreError, FileNotFoundError):
            raise
        except TimeoutError as error:
            raise StoreError(f"{asked}: timed out; the node is lost or overloaded") from error
        except (OSError, HTTPException) as error:
            raise StoreError(f"{asked}: {error or type(error).__name__}") from error
        finally:
            if connection is not None:
                self._give_back(connection, response)

    def _connected(self) -> tuple[HTTPConnection, bool]:
        """Return an idle or a new connection, and whether it is new."""
        with self._lock:
            if self._idle and not self._aborted:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection, False
        return self._connect(), True

    def _connect(self) -> HTTPConnection:
        if self._secure != (self._tls is not None):
            uses = "requires TLS: pass certificates (tls=)" if self._secure else "does not use TLS"
            raise StoreError(f"{self}: the agent {uses}; nothing was sent to it")
        connection = HTTPConnection(self._host, self._port)
        connection.auto_open = 0  # a reconnect by http.client would be unencrypted
        line = _reach(self._host, self._port, self._connect_timeout, lambda: self._aborted)
        try:
            line.settimeout(self._connect_timeout)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                line = self._tls.wrap_socket(
                    line, server_hostname=self._host, do_handshake_on_connect=False
                )
            connection.sock = line
            with self._lock:
                if self._aborted:
                    raise ConnectionAbortedError("the request was aborted")
                self._busy.add(connection)
            if isinstance(line, ssl.SSLSocket):
                line.do_handshake()
        except BaseException:
            with self._lock:
                self._busy.discard(connection)
            line.close()
            raise
        return connection

    def _give_back(self, connection: HTTPConnection, response: HTTPResponse | None) -> None:
        with self._lock:
            self._busy.discard(connection)
            whole = response is not None and response.isclosed() and connection.sock is not None
            reusable = whole and not self._closed
            if reusable:
                self._idle.append(connection)
        if not reusable:
            if response is not None:
                response.close()
            connection.close()

    def _all(self, response: HTTPResponse, limit: int) -> bytes:
        if response.length is None:
            raise StoreError(f"{self}: the response has no Content-Length")
        if response.length > limit:
            raise StoreError(f"{self}: the response has {response.length} bytes; at most {limit}")
        return response.read()

    def _decode(self, response: HTTPResponse, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self._all(response, LARGEST_ANSWER), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{self}: not an agent, or one of another version: {error}") from error


def _reach(host: str, port: int, timeout: float, is_aborted: Callable[[], bool]) -> socket.socket:
    """Return a non-blocking TCP connection.

    It starts a new attempt every fifth of a second while earlier ones stay open, because the
    system retransmits a lost SYN only after a second.

    Raises:
        TimeoutError: no connection was established within `timeout` seconds.
        OSError: every address refused the connection, or the attempt was aborted.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    now = time.monotonic()
    deadline, again, begun = now + timeout, now, 0
    with ExitStack() as unused, selectors.DefaultSelector() as pending:
        while now < deadline and not is_aborted():
            if now >= again or not pending.get_map():
                if failure is not None and begun >= len(addresses) and not pending.get_map():
                    raise failure
                family, kind, protocol, _, address = addresses[begun % len(addresses)]
                line = socket.socket(family, kind, protocol)
                unused.callback(line.close)
                line.setblocking(False)
                code = line.connect_ex(address)
                begun, again = begun + 1, now + SYN_AGAIN
                if code in (0, EINPROGRESS):
                    pending.register(line, selectors.EVENT_WRITE, line)
                else:
                    failure = OSError(code, os.strerror(code))
            for key, _ in pending.select(min(LOOK, max(0.0, deadline - now))):
                pending.unregister(key.fileobj)
                code = key.data.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return socket.socket(fileno=key.data.detach())
                failure = OSError(code, os.strerror(code))
            now = time.monotonic()
    if is_aborted():
        raise ConnectionAbortedError("the request was aborted")
    raise TimeoutError(f"no connection within {timeout:g} s")


def _exchange(
    connection: HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
    patience: float,
) -> HTTPResponse:
    try:
        connection.sock.settimeout(patience)
        connection.request(method, path, body, headers)
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _refusal(asked: str, response: HTTPResponse) -> OSError:
    said = response.read(LONGEST_EXPLANATION).decode(errors="replace")
    text = "".join(char for char in said if char.isprintable()) or response.reason
    if response.status == 404:
        return FileNotFoundError(f"{asked}: not found")
    if response.status == 401:
        return StoreError(
            f"{asked}: the agent refused this token: another agent has replaced it; get its token"
        )
    return StoreError(f"{asked}: {response.status}: {text}")


def _address(info: AgentInfo) -> tuple[str, int, bool]:
    try:
        url = urlsplit(info.url)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    if url.scheme not in ("http", "https") or not url.hostname or port is None:
        raise StoreError(f"node {info.node}: {info.url!r} is not an http(s) URL with host and port")
    return url.hostname, port, url.scheme == "https"


def _path(run: str, step: int | None = None, name: str = "") -> str:
    if not _RUN.fullmatch(run):
        raise StoreError(f"{run!r} is not a run id: expected 16 hexadecimal digits")
    if step is None:
        return f"/runs/{run}"
    if not _NAME.fullmatch(name) or step < 0:
        raise StoreError(f"{name!r} is not a plain file name (step {step} of run {run})")
    return f"/runs/{run}/{step_directory(step)}/{name}"
