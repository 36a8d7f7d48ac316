"""The connections of an agent's HTTP server: how many there may be, for how long, and from whom.

Unauthenticated can open connections and send what they like before they must show the secret. They
cannot keep others from being answered, or fill the log.
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
FIRST_REQUEST = 5.0
QUIET = 90.0
HANDSHAKE = 5.0
ENDING = 2.0
LOG_INTERVAL = 60.0
log = logging.getLogger("shardwise.agent")


class Unauthenticated:
    """Connections over which the secret has not been shown yet.

    Each is closed after a few seconds. Where there are too many, the oldest makes room for the
    newest: whoever knows the secret shows it at once.

    Args:
        most: how many there may be.
        of_address: how many of these from one address.
        patience: seconds until one is closed.
    """

    def __init__(self, most: int, of_address: int, patience: float) -> None:
        self._most = most
        self._of_address = of_address
        self._patience = patience
        self._timers: dict[asyncio.BaseTransport, tuple[str, asyncio.TimerHandle]] = {}

    def add(self, transport: asyncio.Transport) -> None:
        """A connection was opened."""
        for each in [each for each in self._timers if each.is_closing()]:
            self.remove(each)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        same = [each for each, (its, _) in self._timers.items() if its == address]
        if len(same) >= self._of_address:
            self._close(same[0])
        elif len(self._timers) >= self._most:
            self.close_oldest()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience, self._close, transport)
        self._timers[transport] = (address, timer)

    def remove(self, transport: asyncio.BaseTransport | None) -> None:
        """The secret was shown over a connection, or it was closed."""
        _, timer = self._timers.pop(transport, ("", None)) if transport else ("", None)
        if timer is not None:
            timer.cancel()

    def close_oldest(self) -> bool:
        """Close the oldest; whether there was any."""
        oldest = next(iter(self._timers), None)
        if oldest is not None:
            self._close(oldest)
        return oldest is not None

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.remove(transport)
        if isinstance(transport, asyncio.Transport):
            transport.abort()


UNAUTHENTICATED = web.AppKey("unauthenticated", Unauthenticated)


class RateLimitedLog(logging.Logger):
    """Logs what a server has to say about requests: each kind once a minute at most.

    Requests that are not HTTP are one line without their content. Other errors are faults of the
    agent: the first of a kind has its traceback.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("shardwise.agent.requests", logging.WARNING)
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def handle(self, record: logging.LogRecord) -> None:
        """Count a record, and log it unless one of its kind was logged just now."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._report("a request is not valid HTTP", error, with_trace=False)
        else:
            self._report(str(record.msg).split(" from ")[0], error, with_trace=True)

    def of_loop(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What an event loop calls where nobody handles an exception."""
        self._report(str(context.get("message")), context.get("exception"), with_trace=True)

    def _report(self, what: str, error: BaseException | None, *, with_trace: bool) -> None:
        kind = f"{what} ({type(error).__name__})" if error is not None else what
        self._counts[kind] += 1
        now = self._clock()
        last = self._logged.get(kind)
        if last is not None and now - last < LOG_INTERVAL:
            return
        self._logged[kind] = now
        count, first = self._counts[kind], last is None
        times = "" if count == 1 else f", {count} times by now"
        trace = error if first and with_trace else None
        log.warning("serving other nodes: %s%s", kind, times, exc_info=trace)


@asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    quiet: float = QUIET,
    most: int = MOST_CONNECTIONS,
    errors: RateLimitedLog | None = None,
) -> AsyncIterator[None]:
    """Serve while the block runs.

    Args:
        listener: where connections come in; it is closed in the end.
        tls: certificate and key, to serve https.
        quiet: seconds until a connection is closed over which no whole request comes.
        most: as many connections at a time; half of them may be such over which the secret has not
            been shown. Further ones are closed at once.
        errors: what cannot be answered is logged there.
    """
    errors = errors or RateLimitedLog()
    unauthenticated = Unauthenticated(
        max(1, most // 2), MOST_UNAUTHENTICATED, min(FIRST_REQUEST, quiet)
    )
    app[UNAUTHENTICATED] = unauthenticated
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=errors,
        keepalive_timeout=quiet,
        lingering_time=ENDING,
        auto_decompress=False,
        shutdown_timeout=ENDING,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(errors.of_loop)
    server = await loop.create_server(
        lambda: _Acceptor(runner, unauthenticated, most),
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE,
    )
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


class _Acceptor(asyncio.Protocol):
    """Hands a new connection to the server, or closes it."""

    def __init__(self, runner: web.AppRunner, unauthenticated: Unauthenticated, most: int) -> None:
        self._runner = runner
        self._unauthenticated = unauthenticated
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Decide."""
        server = self._runner.server
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"{transport!r} is no connection")
        full = server is not None and len(server.connections) >= self._most
        if server is None or (full and not self._unauthenticated.close_oldest()):
            transport.abort()
            return
        self._unauthenticated.add(transport)
        handler = server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
