"""A store of objects in the memory of one process, without locks of its own, as object stores are.

A file exists once it is complete, and locks are leases. Requests are counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store import FileStatus, ReadableFile, Store, WritableFile
from shardwise.kernel.store.store import Buffer, StoreTraits
from shardwise.ports import lease_locks


@dataclass
class Server:
    """The objects, by path, with the time at which each was written.

    Attributes:
        now: the server's clock, in seconds.
        refused: verbs that are not permitted.
        requests: how often each verb was called.
        lease: how many seconds a lock counts after its holder was last heard of.
        grace: how long files of removed checkpoints stay.
    """

    now: float = 1e9
    refused: set[str] = field(default_factory=set)
    requests: Counter[str] = field(default_factory=Counter)
    lease: float = 60.0
    grace: float = 0.0
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, verb: str, path: str) -> None:
        self.requests[verb] += 1
        if verb in self.refused:
            raise PermissionError(f"{verb} {path}: access denied")


class MemoryStore(Store):
    """The objects below a prefix of a server."""

    def __init__(self, server: Server, prefix: str = "") -> None:
        self.server = server
        self._prefix = prefix

    def __str__(self) -> str:
        return f"memory://{self._prefix}"

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(
            lock_expiry=self.server.lease,
            reading_grace=self.server.grace,
        )

    def at(self, name: str) -> MemoryStore:
        return MemoryStore(self.server, f"{self._prefix}{name}/")

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        return _Upload(self, key, size)

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        return _Object(self._get(path))

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        path = self._prefix + key
        self.server.count("put", path)
        with self.server.lock:
            if not replace and path in self.server.objects:
                raise FileExistsError(path)
            self.server.objects[path] = bytes(data), self.server.now

    def read(self, key: str, *, limit: int) -> bytes:
        data = self._get(key)
        if len(data) > limit:
            raise StoreError(f"{key} has {len(data)} bytes")
        return data

    def stat(self, path: str) -> FileStatus | None:
        self.server.count("head", self._prefix + path)
        with self.server.lock:
            found = self.server.objects.get((self._prefix + path).rstrip("/"))
        return None if found is None else FileStatus(len(found[0]), str(found[1]))

    def list(self) -> list[str]:  # type: ignore[valid-type]
        self.server.count("list", self._prefix)
        names = {name.split("/")[0] for name in self._paths()}
        return sorted(name for name in names if not lease_locks.is_lease(name))

    def walk(self, limit: int) -> dict[str, FileStatus]:
        found = {path: self.stat(path) for path in sorted(self._paths())}
        return {path: status for path, status in found.items() if status is not None}

    def delete(self, key: str) -> None:
        if not key:
            return
        self.server.count("delete", self._prefix + key)
        with self.server.lock:
            self.server.objects.pop(self._prefix + key, None)

    def lock(self, key: str, *, shared: bool = False) -> AbstractContextManager[bool]:
        return lease_locks.LeaseDirectory(self, self._times, self.server.lease, pause=0.001).hold(
            key
        )

    def _times(self) -> dict[str, float]:
        self.server.count("list", self._prefix)
        with self.server.lock:
            return {
                path[len(self._prefix) :]: time
                for path, (_, time) in self.server.objects.items()
                if path.startswith(self._prefix) and "/" not in path[len(self._prefix) :]
            }

    def _get(self, key: str) -> bytes:
        self.server.count("get", self._prefix + key)
        with self.server.lock:
            try:
                return self.server.objects[self._prefix + key][0]
            except KeyError:
                raise FileNotFoundError(self._prefix + key) from None

    def _paths(self) -> set[str]:
        with self.server.lock:
            paths = set(self.server.objects)
        return {each[len(self._prefix) :] for each in paths if each.startswith(self._prefix)}


class _Upload:
    def __init__(self, store: MemoryStore, key: str, size: int) -> None:
        self._store, self._key = store, key
        self._data = np.zeros(size, np.uint8)

    def write_at(self, offset: int, data: Buffer) -> None:
        count = min(len(data), len(self._data) - offset)
        self._data[offset : offset + count] = data[:count]

    def commit(self) -> None:
        self._store.publish(self._key, self._data.tobytes(), replace=False)

    def close(self) -> None:
        """Do nothing: without `commit`, there is no file."""


class _Object:
    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.size = len(data)

    def read_at(self, offset: int, out: Buffer) -> int:
        part = self._data[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Do nothing."""
