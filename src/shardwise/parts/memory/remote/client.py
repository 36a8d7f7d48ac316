"""HTTP client of a node's agent. Trainers use it too, so it needs the standard library only.

Each request has one time limit. The timeout of a socket limits only each of its operations, so a
node that sends one byte at a time could delay a restore forever.
"""

from __future__ import annotations

import io
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.files import LARGEST_RECORD, PLAIN_NAME
from shardwise.parts.memory.home import RUN_ID, SNAPSHOT_NAME, FilesOfSnapshots
from shardwise.parts.memory.progress import NodeProgress, RankProgress
from shardwise.parts.memory.records import AgentInfo, Failing, Outcomes
from shardwise.parts.memory.times import LONGEST_ATTEMPT, SHORTEST_ATTEMPT

LARGEST_LIST, LONGEST_EXPLANATION = 1 << 26, 500  # bytes
_TOKEN = re.compile(r"[!-~]{1,512}")
_CLOSED_BY_AGENT = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
NO_AGENT = "not an agent of this version of shardwise; install one version on all nodes"
SLOWEST_RATE = 1 << 20
"""Bytes per second. Each byte that is received extends the time limit accordingly."""
T = TypeVar("T")
_ABORTED = "aborted, because the snapshot was discarded, or the search for snapshots has ended"


class Discarded(StoreError):  # noqa: N818
    """The node has discarded the snapshot."""


class AgentClient:
    """A client of one agent. Threads may share it: concurrent requests use separate connections.

    Every method raises `StoreError` if the agent is unreachable, sends too little, or refuses.

    Args:
        info: the agent's URL and token.
        connect_timeout: seconds until a node that does not accept a connection counts as lost.
        read_timeout: seconds until a request fails if it has not ended. This limit is a second
            longer for each MiB that is received.
        tls: the TLS context for an https URL. An http URL is then refused.
        deadline: the common limit of all requests; None if each request only has its own.

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
        deadline: Deadline | None = None,
    ) -> None:
        self._description = f"node {info.node} ({info.url})"
        self._host, self._port, self._uses_tls = _parse_url(info)
        self._tls = tls
        if not _TOKEN.fullmatch(info.token):
            raise StoreError(f"{self._description}: its record has an invalid token: restart it")
        self._headers = {"Authorization": f"Bearer {info.token}"}
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._deadline = deadline or Deadline(None)
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._closed = False
        self._aborted = threading.Event()

    def __str__(self) -> str:
        return self._description

    def close(self) -> None:
        """Close idle connections. Requests in progress complete normally."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def abort(self) -> None:
        """Make requests in progress and all later requests fail. Any thread may call this."""
        with self._lock:
            self._aborted.set()
            for connection in self._busy:
                with suppress(OSError, TypeError):  # closed meanwhile
                    # SSLSocket.shutdown would make other threads read ciphertext.
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        self.close()

    def list_failing(self) -> list[Failing]:
        """Return the saves and runs that the agent fails to work on."""
        return self._request("GET", "/health", lambda r: self._decode(r, "/health", list[Failing]))

    def list_progress(self, run: str) -> list[RankProgress]:
        """Return what the ranks of a run on the node do now."""
        path = f"{_url_path(run)}/progress"
        return self._request("GET", path, lambda r: self._decode(r, path, NodeProgress))

    def list_files(self, run: str) -> FilesOfSnapshots:
        """Return the files of a run on the node; empty if there are none."""
        path = _url_path(run)
        return self._request("GET", path, lambda r: self._decode(r, path, FilesOfSnapshots))

    def read_outcomes(self, run: str, version: int, wait: float) -> Outcomes:
        """Return how the stages of a run's saves have ended, as the node knows it.

        Args:
            version: the version of the last result; the node replies when it has another one.
            wait: seconds after which it replies in any case.
        """
        path = f"{_url_path(run)}/outcomes?version={version}&wait={wait:.3f}"
        return self._request("GET", path, lambda r: self._decode(r, path, Outcomes), wait=wait)

    def call(
        self,
        run: str,
        snapshot: str,
        stage: str,
        top: str,
        *,
        patience: float,
        wait: float,
    ) -> bytes | None:
        """Call the node, and the nodes below it in the tree, to do their part of a stage.

        Args:
            snapshot: the name of the snapshot's directory.
            top: the node that leads the stage.
            patience: seconds that they wait for nodes that do not answer, and for what is missing.
            wait: seconds after which the node answers, even if it has not finished.

        Returns:
            The encoded `SubtreeReply`; None if the node has not finished.

        Raises:
            FileNotFoundError: the node does not have the snapshot.
            Discarded: it has discarded the snapshot.
        """
        query = f"top={quote(top, safe='')}&patience={patience:.3f}&wait={wait:.3f}"
        path = f"{_url_path(run, snapshot, stage)}?{query}"

        def read(response: HTTPResponse) -> bytes | None:
            body = self._read_body(response, path, LARGEST_RECORD)
            return body if response.status == 200 else None

        return self._request("POST", path, read, wait=wait)

    def read(self, run: str, snapshot: str, name: str, *, limit: int) -> bytes:
        """Return the contents of a small file.

        Args:
            snapshot: the name of the snapshot's directory.
            limit: the largest size to accept, in bytes.

        Raises:
            FileNotFoundError: the node does not have the file.
            StoreError: the file is larger than `limit`.
        """
        path = _url_path(run, snapshot, name)
        return self._request("GET", path, lambda r: self._read_body(r, path, limit))

    def read_range_into(self, run: str, snapshot: str, name: str, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes of a file from `offset`.

        Raises:
            FileNotFoundError: the node does not have the file.
            StoreError: the file ends earlier.
        """
        if len(out) == 0:
            return
        requested = f"{offset}-{offset + len(out) - 1}"
        request = f"{self}: bytes {requested} of {name} of {snapshot}"

        def fill(response: HTTPResponse) -> None:
            header = response.headers.get("Content-Range", "no range")
            received = header.removeprefix("bytes ").split("/")[0]
            if response.status != 206 or received != requested or response.length != len(out):
                raise StoreError(
                    f"{request}: the agent sent {response.length} bytes, {received}: the file on "
                    "this node may be cut off; a restore reads another copy, or an older step"
                )
            remaining = out.data
            while remaining:
                count = response.readinto(remaining)
                if count == 0:
                    done = len(out) - len(remaining)
                    raise StoreError(f"{request}: the agent closed it after {done} bytes")
                remaining = remaining[count:]

        headers = {"Range": f"bytes={requested}"}
        self._request("GET", _url_path(run, snapshot, name), fill, headers=headers)

    def _request(
        self,
        method: str,
        path: str,
        read_response: Callable[[HTTPResponse], T],
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> T:
        """Send a request, to which the agent may reply after `wait` seconds; read the response."""
        request = f"{self}: {method} {path}"
        connection: HTTPConnection | None = None
        response: HTTPResponse | None = None
        limit = min(self._connect_timeout, self._deadline.seconds_left())
        try:
            all_headers = {**self._headers, **(headers or {})}
            connection, is_new = self._take_connection()
            limit = min(self._read_timeout + wait, self._deadline.seconds_left())
            deadline = Deadline(limit)
            try:
                response = _send_request(connection, method, path, all_headers, deadline)
            except _CLOSED_BY_AGENT:
                if is_new:
                    raise
                self._give_back(connection, None)  # the agent closed the idle connection
                connection = self._connect()
                response = _send_request(connection, method, path, all_headers, deadline)
            if response.status not in (200, 202, 204, 206):
                raise _make_error(request, response)
            return read_response(response)
        except (StoreError, FileNotFoundError):
            raise
        except TimeoutError as error:
            what = "no answer" if response is None else "no complete answer"
            raise StoreError(
                f"{request}: {what} in {limit:.3g} s: lost or overloaded; see the log of its agent"
            ) from error
        except (OSError, HTTPException) as error:
            hint = "" if self._tls is None or response is not None else _tls_problem(error)
            raise StoreError(f"{request}: {error or type(error).__name__}{hint}") from error
        finally:
            if connection is not None:
                self._give_back(connection, response)

    def _take_connection(self) -> tuple[HTTPConnection, bool]:
        """Return an idle or a new connection, and whether it is new."""
        with self._lock:
            if self._idle and not self._aborted.is_set():
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection, False
        return self._connect(), True

    def _connect(self) -> HTTPConnection:
        if self._uses_tls != (self._tls is not None):
            problem = (
                "requires TLS: pass certificates (tls=)"
                if self._uses_tls
                else "does not use TLS: start it with certificates (--tls-cert), or leave out tls="
            )
            raise StoreError(f"{self}: nothing was sent to it, because the agent {problem}")
        connection = HTTPConnection(self._host, self._port)
        connection.auto_open = 0  # a reconnect by http.client would be unencrypted
        deadline = Deadline(min(self._connect_timeout, self._deadline.seconds_left()))
        sock = _dial(self._host, self._port, deadline, self._aborted)
        try:
            sock.settimeout(max(deadline.seconds_left(), 0.001))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(
                    sock, server_hostname=self._host, do_handshake_on_connect=False
                )
            connection.sock = sock
            with self._lock:
                if self._aborted.is_set():
                    raise ConnectionAbortedError(_ABORTED)
                self._busy.add(connection)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
        except BaseException:
            with self._lock:
                self._busy.discard(connection)
            sock.close()
            raise
        return connection

    def _give_back(self, connection: HTTPConnection, response: HTTPResponse | None) -> None:
        """Keep a connection for later requests if its response was read to the end."""
        with self._lock:
            self._busy.discard(connection)
            is_read = response is not None and response.isclosed() and connection.sock is not None
            is_reusable = is_read and not self._closed
            if is_reusable:
                self._idle.append(connection)
        if not is_reusable:
            if response is not None:
                response.close()
            connection.close()

    def _read_body(self, response: HTTPResponse, path: str, limit: int) -> bytes:
        if response.length is None:
            raise StoreError(f"{self}: GET {path}: no Content-Length; {NO_AGENT}")
        if response.length > limit:
            raise StoreError(f"{self}: GET {path}: {response.length} bytes; at most {limit}")
        return response.read()

    def _decode(self, response: HTTPResponse, path: str, response_type: type[T]) -> T:
        try:
            body = self._read_body(response, path, LARGEST_LIST)
            return msgspec.json.decode(body, type=response_type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{self}: GET {path}: {error}; {NO_AGENT}") from error


def _dial(host: str, port: int, deadline: Deadline, aborted: threading.Event) -> socket.socket:
    """Return a TCP connection.

    The first attempt is short, because the system sends a lost packet again only after a second.

    Raises:
        TimeoutError: no connection was established before the deadline.
        OSError: every address refused the connection, or the attempt was aborted.
    """
    timeout = SHORTEST_ATTEMPT
    while not aborted.is_set():
        left = deadline.seconds_left()
        try:
            return socket.create_connection((host, port), max(min(timeout, left), 0.001))
        except TimeoutError:
            if left <= timeout:
                raise
        timeout = min(2 * timeout, LONGEST_ATTEMPT)
    raise ConnectionAbortedError(_ABORTED)


def _tls_problem(error: Exception) -> str:
    """Return which certificate is wrong, or may be, if a request over TLS has failed like this."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            ". The certificate of that agent is not accepted: Tls(ca=…) of this process must have "
            "signed it, and it must be valid now"
        )
    # Since TLS 1.3, a server refuses the certificate of a client after the handshake, and some
    # close the connection before the client has read why.
    is_alert = isinstance(error, ssl.SSLError) and "alert" in str(error).lower()
    if is_alert or isinstance(error, (*_CLOSED_BY_AGENT, HTTPException)):
        return (
            f". That agent {'refuses' if is_alert else 'may have refused'} the certificate of this "
            "process: Tls(ca=…) of the agent must have signed Tls(certificate=…) of this process, "
            "and it must be valid now"
        )
    return ""


def _make_error(request: str, response: HTTPResponse) -> OSError:
    body = response.read(LONGEST_EXPLANATION).decode(errors="replace")
    explanation = "".join(char for char in body if char.isprintable()) or response.reason
    if response.status == 404:
        return FileNotFoundError(f"{request}: not found")
    if response.status == 410:
        return Discarded(f"{request}: {explanation}")
    if response.status == 401:
        return StoreError(
            f"{request}: the agent refused this token: read the token of the agent that runs now"
        )
    return StoreError(f"{request}: {response.status}: {explanation}")


def _parse_url(info: AgentInfo) -> tuple[str, int, bool]:
    """Return the host and the port of an agent, and whether it uses TLS."""
    try:
        url = urlsplit(info.url)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    if url.scheme not in ("http", "https") or not url.hostname or port is None:
        raise StoreError(
            f"node {info.node}: the address of its agent, {info.url!r}, is not an http(s) URL with "
            "host and port: restart this agent, which writes its address again"
        )
    return url.hostname, port, url.scheme == "https"


def _url_path(run: str, snapshot: str = "", name: str = "") -> str:
    """Return the URL path of a run, or of a file or stage of one of its snapshots."""
    if not RUN_ID.fullmatch(run):
        raise StoreError(f"{run!r} is not a run id: expected 16 hexadecimal digits")
    if not snapshot:
        return f"/runs/{run}"
    if not re.match(PLAIN_NAME, name) or not SNAPSHOT_NAME.fullmatch(snapshot):
        raise StoreError(f"{name!r} of {snapshot!r} is not a file of a snapshot of run {run}")
    return f"/runs/{run}/{snapshot}/{name}"


def _send_request(
    connection: HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    deadline: Deadline,
) -> HTTPResponse:
    """Send a request, and receive the headers of the response.

    The caller reads the body, which has the same deadline. If this function fails, it closes the
    connection.

    Raises:
        TimeoutError: the deadline has passed.
        OSError, HTTPException: the connection failed, or the answer is invalid.
    """
    try:
        _limit_next_operation(connection.sock, deadline)
        connection.response_class = partial(_TimedResponse, deadline=deadline)  # type: ignore[assignment]
        connection.request(method, path, headers=headers)
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _limit_next_operation(sock: socket.socket, deadline: Deadline) -> None:
    seconds = deadline.seconds_left()
    if not seconds:
        raise TimeoutError("the time limit of the request has passed")
    sock.settimeout(seconds)


class _TimedResponse(HTTPResponse):
    """A response that has to be read before a deadline."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: Deadline, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        raw: socket.SocketIO = self.fp.detach()  # type: ignore[assignment]
        self.fp = io.BufferedReader(_TimedReader(sock, raw, deadline))


class _TimedReader(io.RawIOBase):
    """What a socket receives before a deadline."""

    def __init__(self, sock: socket.socket, raw: socket.SocketIO, deadline: Deadline) -> None:
        self._sock, self._raw, self._deadline = sock, raw, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        _limit_next_operation(self._sock, self._deadline)
        count = self._raw.readinto(buffer)
        self._deadline.extend((count or 0) / SLOWEST_RATE)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
