"""A store in the memory of this process, whose requests are counted. It has no paths."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shardwise.errors import StoreError
from shardwise.store import FileStatus
from shardwise.store.local import check_name, check_name_to_write
from shardwise.store.store import Buffer


@dataclass(slots=True)
class Bucket:
    """The objects of all stores that share it, and the requests for them.

    Attributes:
        objects: the content and the version of each object, by its key.
        requests: one line for each request.
        bytes_read: the bytes that were read from objects.
        fail_writes_after: the number of files that can be created before the storage fails.
    """

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bytes_read: int = 0
    fail_writes_after: int | None = None
    written: int = 0
    held: dict[str, list[bool]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, key: str, data: bytes, *, replace_existing: bool = True) -> None:
        with self.lock:
            self.requests.append(f"put {key}")
            if not replace_existing and key in self.objects:
                raise FileExistsError(key)
            self.written += 1
            self.objects[key] = data, self.written

    def get(self, key: str, start: int, stop: int | None) -> bytes:
        with self.lock:
            self.requests.append(f"get {key} {start}:{stop}")
            if key not in self.objects:
                raise FileNotFoundError(key)
            data = self.objects[key][0][start:stop]
            self.bytes_read += len(data)
            return data

    def keys(self, prefix: str) -> list[str]:
        with self.lock:
            self.requests.append(f"list {prefix}")
            return sorted(key for key in self.objects if key.startswith(prefix))


@dataclass(frozen=True)
class MemoryStore:
    """Objects whose keys begin with a path. Their URL has an option, as that of other stores."""

    bucket: Bucket
    path: tuple[str, ...] = ()
    alignment = 4096

    def __str__(self) -> str:
        return f"memory://{'/'.join(self.path)}?endpoint=http://127.0.0.1:9"

    @property
    def name(self) -> str:
        return self.path[-1] if self.path else ""

    @property
    def parent(self) -> MemoryStore | None:
        return replace(self, path=self.path[:-1]) if self.path else None

    @property
    def _key(self) -> str:
        return "/".join(self.path)

    @property
    def _prefix(self) -> str:
        return "".join(f"{part}/" for part in self.path)

    def at(self, name: str) -> MemoryStore:
        check_name(name, str(self))
        return replace(self, path=(*self.path, name))

    def exists(self) -> bool:
        return self.is_file() or bool(self.bucket.keys(self._prefix))

    def is_file(self) -> bool:
        self.bucket.requests.append(f"head {self._key}")
        return self._key in self.bucket.objects

    def walk(self, limit: int) -> dict[str, FileStatus]:
        keys = [self._key] if self.is_file() else self.bucket.keys(self._prefix)
        if len(keys) > limit:
            raise StoreError(f"{self}: the directory contains more than {limit} files")
        cut = len(self._prefix) if not self.is_file() else len(self._key) - len(self.name)
        statuses = ((key[cut:], self.bucket.objects[key]) for key in keys)
        return {path: FileStatus(len(data), str(time)) for path, (data, time) in statuses}

    def open(self, key: str) -> _Reader:
        check_name(key, str(self))
        return self.open_below(key)

    def open_below(self, path: str, size: int | None = None) -> _Reader:
        key = self._prefix + path if path else self._key
        if size is None:
            self.bucket.requests.append(f"head {key}")
            if key not in self.bucket.objects:
                raise FileNotFoundError(f"{self} has no {path}")
            size = len(self.bucket.objects[key][0])
        return _Reader(self.bucket, key, size)

    def create(self, key: str, size: int) -> _Writer:
        check_name_to_write(key, str(self))
        if self._prefix + key in self.bucket.objects:
            raise FileExistsError(key)
        return _Writer(self.bucket, self._prefix + key, size)

    def create_atomic(self, key: str, size: int) -> _Writer:
        check_name_to_write(key, str(self))
        return _Writer(self.bucket, self._prefix + key, size)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        check_name_to_write(key, str(self))
        self.bucket.put(self._prefix + key, data, replace_existing=replace)

    def read(self, key: str, *, limit: int) -> bytes:
        check_name(key, str(self))
        data = self.bucket.get(self._prefix + key, 0, limit + 1)
        if len(data) > limit:
            raise StoreError(f"{self}: {key} has more than {limit} bytes")
        return data

    def list(self) -> list[str]:
        cut = len(self._prefix)
        return sorted({key[cut:].partition("/")[0] for key in self.bucket.keys(self._prefix)})

    def delete(self, key: str) -> None:
        check_name_to_write(key, str(self))
        self.bucket.requests.append(f"delete {self._prefix + key}")
        self.bucket.objects.pop(self._prefix + key, None)

    def remove(self) -> None:
        if self.bucket.keys(self._prefix):
            raise OSError(f"{self} is not empty")

    def sync(self) -> None:
        pass

    @contextmanager
    def hold(self, key: str, *, shared: bool) -> Iterator[bool]:
        place = self._prefix + key
        holders = self.bucket.held.setdefault(place, [])
        if not shared:
            self.bucket.objects.setdefault(place, (b"", 0))
        held = place in self.bucket.objects and (all(holders) if shared else not holders)
        if held:
            holders.append(shared)
        try:
            yield held
        finally:
            if held:
                holders.remove(shared)


@dataclass(frozen=True, slots=True)
class _Reader:
    bucket: Bucket
    key: str
    size: int

    def read_at(self, offset: int, out: Buffer) -> int:
        data = self.bucket.get(self.key, offset, offset + len(out))
        out.data[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


class _Writer:
    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        if bucket.fail_writes_after is not None:
            bucket.fail_writes_after -= 1
            if bucket.fail_writes_after < 0:
                raise OSError("the storage failed")
        self._bucket, self._key = bucket, key
        self._data = bytearray(size)

    def write_at(self, offset: int, data: Buffer) -> None:
        part = data.tobytes()[: len(self._data) - offset]
        self._data[offset : offset + len(part)] = part

    def commit(self) -> None:
        self._bucket.put(self._key, bytes(self._data))

    def close(self) -> None:
        pass
