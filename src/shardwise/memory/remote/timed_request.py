"""HTTP requests, each with one time limit.

The timeout of a socket limits only each of its operations, so a node that sends one byte at a time
could delay a restore forever.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from shardwise.deadline import Deadline

SLOWEST_RATE = 1 << 20
"""Bytes per second. Each byte that is sent or received extends the time limit accordingly."""
_PART = 1 << 14  # the size of a TLS record: a timeout applies to each record of a longer send


def send_request(
    connection: HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes | None,
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
        if body is None:
            connection.request(method, path, headers=headers)
        else:
            headers = {**headers, "Content-Length": str(len(body))}
            connection.request(method, path, _timed_parts(connection.sock, body, deadline), headers)
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _timed_parts(sock: socket.socket, body: bytes, deadline: Deadline) -> Iterator[bytes]:
    """Yield the parts of a body; each has to be sent before the deadline."""
    for low in range(0, len(body), _PART):
        _limit_next_operation(sock, deadline)
        part = body[low : low + _PART]
        yield part
        deadline.extend(len(part) / SLOWEST_RATE)


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
