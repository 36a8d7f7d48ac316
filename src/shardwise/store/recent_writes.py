"""Remember what was written a moment ago, because a server may not find it at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from shardwise.store.object_errors import NOT_FOUND, http_status

SECONDS = 10.0


class RecentWrites:
    """The objects that a client wrote in the last `SECONDS`, and has not deleted since.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._written_at: dict[str, float] = {}  # by place, the oldest first

    def add(self, place: str) -> None:
        """Remember a write."""
        with self._lock:
            self._written_at.pop(place, None)
            self._written_at[place] = self._clock()
            self._forget_old()

    def discard(self, place: str) -> None:
        """Forget a write."""
        with self._lock:
            self._written_at.pop(place, None)

    def explain(self, error: OSError, action: str, place: str) -> bool:
        """Return whether an error may only say that the server does not find a write yet.

        Args:
            error: what `translate_errors` raised for a request.
            action, place: as for `translate_errors`. A listing may miss any write.
        """
        if http_status(error.__cause__ or error) != NOT_FOUND:
            return False
        with self._lock:
            self._forget_old()
            return bool(self._written_at) if action == "list" else place in self._written_at

    def _forget_old(self) -> None:
        limit = self._clock() - SECONDS
        old = itertools.takewhile(lambda each: each[1] < limit, self._written_at.items())
        for place, _ in list(old):
            del self._written_at[place]
