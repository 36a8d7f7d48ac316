"""Read an object by requests for ranges."""

from __future__ import annotations

import numpy as np

from shardwise.errors import StoreError
from shardwise.store.object_clients import Client
from shardwise.store.store import Buffer

LONGEST_REQUEST = 64 << 20
READ_ATTEMPTS = 3


class ObjectReader:
    """An object, which is read by requests for ranges.

    Args:
        client: the client of its bucket.
        path: its key.
        place: its URL, for messages.
        size: its size, in bytes.
    """

    def __init__(self, client: Client, path: str, place: str, size: int) -> None:
        self._client = client
        self._path = path
        self._place = place
        self.size = size

    def read_at(self, offset: int, out: Buffer) -> int:
        end = min(offset + len(out), self.size)
        for low in range(offset, end, LONGEST_REQUEST):
            high = min(low + LONGEST_REQUEST, end)
            out[low - offset : high - offset] = self._request(low, high)
        return max(0, end - offset)

    def view(self, offset: int, count: int) -> Buffer:
        end = min(offset + count, self.size)
        return self._request(offset, end) if offset < end else np.zeros(0, np.uint8)

    def _request(self, low: int, high: int) -> Buffer:
        import obstore

        for _ in range(READ_ATTEMPTS):
            with self._client.request(f"read bytes {low}:{high}", self._place):
                data = obstore.get_range(self._client.open(), self._path, start=low, end=high)
            found: Buffer = np.frombuffer(memoryview(data), np.uint8)
            if len(found) == high - low:
                return found
        raise StoreError(
            f"{self._place}: cannot read bytes {low}:{high}: the server sent {len(found)} bytes "
            f"instead of {high - low}; it ignores ranges, or cuts its answers: use another server"
        )

    def close(self) -> None:
        pass
