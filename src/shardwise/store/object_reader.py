"""Read an object: whole if it is small, otherwise by requests for ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.store.object_clients import Client
from shardwise.store.store import Buffer

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LONGEST_REQUEST = 64 << 20
READ_ATTEMPTS = 3


def read_object(client: Client, key: str, *, limit: int) -> bytes:
    """Return the content of a small object.

    Args:
        client: the client of its bucket.
        key: its key.
        limit: the largest size, in bytes.

    Raises:
        FileNotFoundError: there is no such object.
        StoreError: the object is larger, or cannot be read.
    """
    import obstore

    def get(store: ObjectStore) -> bytes:
        result = obstore.get(store, key)
        size = result.meta["size"]
        if size > limit:
            raise StoreError(
                f"{client.place(key)} has {size} bytes, but at most {limit} are expected: it is "
                "damaged, or another program wrote it: copy it from an intact source, or load "
                "another checkpoint"
            )
        content = bytes(result.bytes())
        if len(content) != size:
            raise StoreUnavailableError(
                f"{client.place(key)}: the server sent {len(content)} of {size} bytes; try again"
            )
        return content

    return client.request("read", key, get)


class ObjectReader:
    """An object, which is read by requests for ranges.

    Args:
        client: the client of its bucket.
        key: its key.
        size: its size, in bytes.
    """

    def __init__(self, client: Client, key: str, size: int) -> None:
        self._client, self._key = client, key
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
            data = self._client.request(
                f"read bytes {low}:{high}",
                self._key,
                lambda store: obstore.get_range(store, self._key, start=low, end=high),
            )
            found: Buffer = np.frombuffer(memoryview(data), np.uint8)
            if len(found) == high - low:
                return found
        raise StoreError(
            f"{self._client.place(self._key)}: cannot read bytes {low}:{high}: the server sent "
            f"{len(found)} bytes instead of {high - low}; it ignores ranges, or cuts its answers: "
            "use another server"
        )

    def close(self) -> None:
        pass
