"""Warn early if an object store does not answer, because obstore repeats requests silently."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WARNING_SECONDS = 10.0

log = logging.getLogger("shardwise")


class OutageWatch:
    """Logs a warning if a request takes long because the server cannot be reached.

    A request may also take long because it moves many bytes, so the server is probed first. Each
    outage is logged once. A thread runs only while there are requests.

    Args:
        retry_seconds: how long obstore repeats a request.
        probe: sends a request that is not repeated. Returns which server cannot be reached, and
            why; "" if the server can be reached.
        seconds: how long to wait for a request before a probe, and how long between two probes.
    """

    def __init__(
        self, retry_seconds: float, probe: Callable[[], str], seconds: float = WARNING_SECONDS
    ) -> None:
        self._retry_seconds, self._probe, self._seconds = retry_seconds, probe, seconds
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._begun_at: dict[object, float] = {}
        self._is_reported = False

    @contextmanager
    def watch_request(self) -> Iterator[None]:
        """Watch the request that the block makes."""
        request = object()
        with self._lock:
            self._begun_at[request] = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="shardwise-outages", daemon=True
                )
                self._thread.start()
        try:
            yield
            self._is_reported = False
        finally:
            with self._lock:
                del self._begun_at[request]

    def _watch(self) -> None:
        probed_at = 0.0
        while (begun_at := self._oldest_begun_at()) is not None:
            wait = max(begun_at, probed_at) + self._seconds - time.monotonic()
            if wait > 0 or self._is_reported:
                time.sleep(max(wait, self._seconds / 10))
                continue
            reason = self._probe()
            probed_at = time.monotonic()
            if reason:
                self._report(begun_at, reason)

    def _oldest_begun_at(self) -> float | None:
        """Return when the oldest request began. Without requests, end the thread: return None."""
        with self._lock:
            if not self._begun_at:
                self._thread = None
            return min(self._begun_at.values(), default=None)

    def _report(self, begun_at: float, reason: str) -> None:
        passed = time.monotonic() - begun_at
        end = time.localtime(time.time() + max(0.0, self._retry_seconds - passed))
        log.warning(
            "%s. A request has had no answer for %.0f s, and is repeated until %s (the option "
            "retry=%g of the URL)",
            *(reason, passed, time.strftime("%H:%M:%S", end), self._retry_seconds),
        )
        self._is_reported = True
