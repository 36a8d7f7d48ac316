"""Limits for the connections of an agent's HTTP server: their number, duration and log messages.

Anybody can open connections and send data without the secret. The limits keep such clients from
blocking other clients, and from filling the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

BACKLOG = 1024
MOST_CONNECTIONS = 1024
MOST_UNAUTHENTICATED = 64
FIRST_REQUEST_TIMEOUT = 5.0
IDLE_TIMEOUT = 90.0
HANDSHAKE_TIMEOUT = 5.0
SHUTDOWN_TIMEOUT = 2.0
LOG_INTERVAL = 60.0
log = logging.getLogger("shardwise.agent")


class UnauthenticatedConnections:
    """The connections on which the client has not presented the secret yet.

    Each connection is closed after a few seconds. If there are too many, the oldest is closed:
    clients that know the secret present it immediately.

    Args:
        most: the largest number of such connections.
        most_from_address: the largest number of such connections from one address.
        timeout: seconds until a connection is closed.
    """

    def __init__(self, most: int, most_from_address: int, timeout: float) -> None:
        self._most = most
        self._most_from_address = most_from_address
        self._timeout = timeout
        self._timers: dict[asyncio.BaseTransport, tuple[str, asyncio.TimerHandle]] = {}

    def add(self, transport: asyncio.Transport) -> None:
        """Add a new connection."""
        for each in [each for each in self._timers if each.is_closing()]:
            self.remove(each)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        from_address = [each for each, (other, _) in self._timers.items() if other == address]
        if len(from_address) >= self._most_from_address:
            self._close(from_address[0])
        elif len(self._timers) >= self._most:
            self.close_oldest()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._timeout, self._close, transport)
        self._timers[transport] = (address, timer)

    def remove(self, transport: asyncio.BaseTransport | None) -> None:
        """Remove a connection that is authenticated or closed now."""
        _, timer = self._timers.pop(transport, ("", None)) if transport else ("", None)
        if timer is not None:
            timer.cancel()

    def close_oldest(self) -> bool:
        """Close the oldest connection; return whether there was one."""
        oldest = next(iter(self._timers), None)
        if oldest is not None:
            self._close(oldest)
        return oldest is not None

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.remove(transport)
        if isinstance(transport, asyncio.Transport):
            transport.abort()


UNAUTHENTICATED_CONNECTIONS = web.AppKey("unauthenticated", UnauthenticatedConnections)


class RateLimitedLog(logging.Logger):
    """Logs errors about requests, each kind at most once a minute.

    A request that is not valid HTTP takes one line, without the content of the request. Other
    errors are defects of the agent. The first error of each kind is logged with its traceback.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("shardwise.agent.requests", logging.WARNING)
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def handle(self, record: logging.LogRecord) -> None:
        """Count a log record, and log it unless a record of the same kind was logged recently."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._report("a request is not valid HTTP", error, with_trace=False)
        else:
            self._report(str(record.msg).split(" from ")[0], error, with_trace=True)

    def handle_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception of the event loop that nothing else handles."""
        self._report(str(context.get("message")), context.get("exception"), with_trace=True)

    def _report(self, message: str, error: BaseException | None, *, with_trace: bool) -> None:
        cause = f"{message} ({type(error).__name__})" if error is not None else message
        self._counts[cause] += 1
        now = self._clock()
        last = self._logged.get(cause)
        if last is not None and now - last < LOG_INTERVAL:
            return
        self._logged[cause] = now
        count = self._counts[cause]
        times = "" if count == 1 else f" ({count} times so far)"
        trace = error if last is None and with_trace else None
        log.warning("serving other nodes: %s%s", cause, times, exc_info=trace)


@asynccontextmanager
async def serve_connections(
    app: web.Application,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    idle_timeout: float = IDLE_TIMEOUT,
    most: int = MOST_CONNECTIONS,
    errors: RateLimitedLog | None = None,
) -> AsyncIterator[None]:
    """Serve an application while the block runs.

    Args:
        listener: the listening socket. It is closed at the end.
        tls: certificate and key for https; None for http.
        idle_timeout: seconds until a connection is closed on which no complete request arrived.
        most: the largest number of connections. Further connections are closed immediately. At
            most half of the connections may be unauthenticated.
        errors: the logger for requests that cannot be answered.
    """
    errors = errors or RateLimitedLog()
    unauthenticated = UnauthenticatedConnections(
        max(1, most // 2), MOST_UNAUTHENTICATED, min(FIRST_REQUEST_TIMEOUT, idle_timeout)
    )
    app[UNAUTHENTICATED_CONNECTIONS] = unauthenticated
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=errors,
        keepalive_timeout=idle_timeout,
        lingering_time=SHUTDOWN_TIMEOUT,
        auto_decompress=False,
        shutdown_timeout=SHUTDOWN_TIMEOUT,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(errors.handle_loop_error)
    server = await loop.create_server(
        lambda: _Acceptor(runner, unauthenticated, most),
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

    def __init__(
        self, runner: web.AppRunner, unauthenticated: UnauthenticatedConnections, most: int
    ) -> None:
        self._runner = runner
        self._unauthenticated = unauthenticated
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept or close a new connection."""
        server = self._runner.server
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"{transport!r} is not a connection")
        is_full = server is not None and len(server.connections) >= self._most
        if server is None or (is_full and not self._unauthenticated.close_oldest()):
            transport.abort()
            return
        self._unauthenticated.add(transport)
        handler = server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
