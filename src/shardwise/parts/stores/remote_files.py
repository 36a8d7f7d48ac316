"""`RemoteFileStore`: the files in a directory of a remote file system, such as HDFS."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.names import (
    StoreUrl,
    check_name,
    check_name_to_write,
    check_path,
    temporary_name,
)
from shardwise.kernel.store.store import (
    LOCK_EXPIRY,
    Buffer,
    FileStatus,
    StoreTraits,
    too_large,
    too_many_files,
)
from shardwise.ports import lease_locks
from shardwise.ports.sequential import SequentialWriter, Stream

PUBLISH_PAUSE = 0.2  # seconds between two attempts to publish a file that others publish too


Entry = tuple[FileStatus, float | None]
"""A file or directory: its status, and when it was last modified, in seconds by the clock of the
server; None if the file system does not say."""
ReadRange = Callable[[int, int], bytes]
"""Returns bytes of a file, given an offset and a count. The range does not reach past its end."""


@dataclass(frozen=True, slots=True)
class RequestStream:
    """A `Stream`, of which each method sends a request."""

    write: Callable[[memoryview], object]
    close: Callable[[], object]


class RemoteFileStore(ABC):
    """Files in a directory of a remote file system.

    Files are written in order, and locks are leases. A subclass defines the requests to a client of
    the file system. The paths of requests begin with `/`. Requests raise `FileNotFoundError`,
    `FileExistsError`, `PermissionError` or another `OSError`.

    Args:
        url: the URL of the directory.
        clients: the client of each process, which the stores below share.

    Attributes:
        refuses_to_replace: whether `_write` fails without `replace` if the file exists. Otherwise,
            a lock protects the file.
    """

    refuses_to_replace = False
    traits = StoreTraits(read_threads=8, staging_bytes=64 << 20)

    def __init__(self, url: StoreUrl, clients: dict[int, Any] | None = None) -> None:
        self.url = url
        self._clients = {} if clients is None else clients

    def __reduce__(self) -> tuple[type[RemoteFileStore], tuple[StoreUrl]]:
        return type(self), (self.url,)

    @abstractmethod
    def _connect(self) -> Any:
        """Return a new client."""

    @abstractmethod
    def _find(self, path: str) -> Entry:
        """Return what is at a path."""

    @abstractmethod
    def _list(self, path: str) -> Mapping[str, Entry]:
        """Return what is in a directory, by name."""

    @abstractmethod
    def _open(self, path: str, size: int | None) -> tuple[int, ReadRange]:
        """Open a file. Return its size, and a function that reads it."""

    @abstractmethod
    def _create(self, path: str) -> Stream:
        """Create a file, and the directories above."""

    @abstractmethod
    def _write(self, path: str, data: bytes, *, replace: bool) -> None:
        """Create a small file atomically, and the directories above."""

    @abstractmethod
    def _rename(self, source: str, target: str) -> None:
        """Rename a file. An existing one is replaced."""

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Delete a file."""

    @abstractmethod
    def _remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    @property
    def _client(self) -> Any:
        """The client of this process.

        After a fork, the parent's client has no threads. It is kept, because deleting it could wait
        for them.
        """
        client = self._clients.get(os.getpid())
        if client is None:
            client = self._clients[os.getpid()] = self._connect()
        return client

    def _forget_client(self) -> None:
        """Let the next request connect anew."""
        self._clients.pop(os.getpid(), None)

    def _place(self, path: str) -> str:
        """Return the URL of a path, without options."""
        return f"{self.url.scheme}://{self.url.host}{path}"

    def __str__(self) -> str:
        return str(self.url)

    @property
    def path(self) -> str:
        """The path of the directory, which begins with `/`."""
        return f"/{self.url.path}"

    def at(self, name: str) -> RemoteFileStore:
        """Return the directory one level below."""
        check_name(name, self)
        return type(self)(self.url.below(name), self._clients)

    def stat(self, path: str) -> FileStatus | None:
        """Return what is at a path."""
        check_path(path, self)
        try:
            return self._find(self._join(path))[0]
        except (FileNotFoundError, NotADirectoryError):
            return None

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the files at all levels below, by relative path. See `Store.walk`."""
        status = self.stat("")
        if status is None or not status.is_directory:
            return {} if status is None else {self.url.name: status}
        found: dict[str, FileStatus] = {}
        directories = [""]
        while directories:
            prefix = directories.pop()
            for name, (status, _) in self._list(self._join(prefix[:-1])).items():
                if status.is_directory:
                    directories.append(f"{prefix}{name}/")
                elif not lease_locks.is_lease(name):
                    found[prefix + name] = status
            if len(found) > limit:
                raise too_many_files(self, limit)
        return dict(sorted(found.items()))

    def open(self, path: str, size: int | None = None) -> _Reader:
        """Open a file."""
        check_path(path, self)
        return _Reader(*self._open(self._join(path), size))

    def create(self, key: str, size: int, *, replace: bool = False) -> SequentialWriter:
        """Create a file of `size` bytes; with `replace`, under a temporary name until it ends.

        It is deleted if it is closed before it is committed.
        """
        path = self._path_to_write(key)
        written = self._path_to_write(temporary_name(key)) if replace else path
        stream = self._create(written)

        def discard() -> None:
            with suppress(OSError):  # the file is deleted in any case
                stream.close()
            self._delete(written)

        return SequentialWriter(
            stream,
            size,
            f"{self}: {key}",
            finish=lambda: self._rename(written, path) if replace else None,
            discard=discard,
        )

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Write a small file atomically. Without `replace`, its name must be free.

        Raises:
            StoreError: other processes kept publishing this file, without success.
        """
        path = self._path_to_write(key)
        if replace or self.refuses_to_replace:
            self._write(path, data, replace=replace)
        else:
            self._publish_new(key, data)

    def _publish_new(self, key: str, data: bytes) -> None:
        """Publish a file under a lock, so that only one process finds that its name is free."""
        for _ in Deadline(2 * LOCK_EXPIRY).attempts(pause=PUBLISH_PAUSE):
            if self.stat(key) is not None:
                raise FileExistsError(errno.EEXIST, "the file exists", f"{self}: {key}")
            # The lock is a file with the name of a temporary file. If this process dies, it is
            # removed as temporary files are.
            lock = f".{key}.00000000"
            with self.lock(lock) as held:
                if held:
                    is_free = self.stat(key) is None
                    if is_free:
                        self._write(self._join(key), data, replace=False)
                    self.delete(lock)
                    if is_free:
                        return
        raise StoreError(
            f"{self}: {key} cannot be published, because other processes hold its lock for "
            f"{2 * LOCK_EXPIRY:g} s; find out which job writes to this directory"
        )

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file."""
        check_name(key, self)
        size, read = self._open(self._join(key), None)
        if size > limit:
            raise too_large(f"{self}: {key}", size, limit)
        return read(0, size)

    def list(self) -> list[str]:
        """Return the names of all files and directories, sorted. Leases are left out."""
        try:
            names = self._list(self.path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not lease_locks.is_lease(name))

    def delete(self, key: str) -> None:
        """Delete a file, if it exists; with "", the directory, if it has no files and leases."""
        with suppress(FileNotFoundError):
            if key:
                self._delete(self._path_to_write(key))
                return
            if self.list():
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
            self._leases().remove_expired()
            self._remove_directory(self.path)

    def lock(self, key: str, *, shared: bool = False) -> AbstractContextManager[bool]:
        """Lock a file by a lease. There are no shared locks."""
        check_name_to_write(key, self)
        return self._leases().hold(key)

    def _leases(self) -> lease_locks.LeaseDirectory:
        return lease_locks.LeaseDirectory(self, self._list_times)

    def _list_times(self) -> dict[str, float]:
        """Return when each file was modified, in seconds by the clock of the server."""
        try:
            entries = self._list(self.path)
        except FileNotFoundError:
            return {}
        if any(time is None and lease_locks.is_lease(name) for name, (_, time) in entries.items()):
            raise StoreError(
                f"{self}: this file system does not tell when files were modified, so that files "
                "cannot be locked; save to another store"
            )
        return {
            name: time or 0.0 for name, (status, time) in entries.items() if not status.is_directory
        }

    def _join(self, relative: str) -> str:
        return f"{self.path.rstrip('/')}/{relative}".rstrip("/") or "/"

    def _path_to_write(self, name: str) -> str:
        check_name_to_write(name, self)
        return self._join(name)


class _Reader:
    """A file that is open for reading."""

    def __init__(self, size: int, read: ReadRange) -> None:
        self.size = size
        self._read = read

    def read_at(self, offset: int, out: Buffer) -> int:
        count = max(0, min(len(out), self.size - offset))
        if count == 0:
            return 0
        data = self._read(offset, count)
        out.data[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
