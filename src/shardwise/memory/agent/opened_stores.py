"""The stores that an agent has opened, so that it uses their connections again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.store import Store, open_store

MOST_STORES = 16


class OpenedStores:
    """The stores that an agent has opened, by URL. Threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}

    @contextmanager
    def open(self, url: str) -> Iterator[Store]:
        """Open a store, and keep it open for later calls, unless the block raises.

        After a failure, the store is opened anew: it may have to read other credentials.

        Raises:
            StoreError: as for `open_store`.
        """
        with self._lock:
            store = self._stores.pop(url, None)
        store = store or open_store(url)
        yield store
        with self._lock:
            self._stores[url] = store
            while len(self._stores) > MOST_STORES:
                del self._stores[next(iter(self._stores))]
