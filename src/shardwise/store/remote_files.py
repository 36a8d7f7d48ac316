"""`RemoteFileStore`: the files in a directory of a remote file system, such as HDFS."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from shardwise.deadline import Deadline
from shardwise.errors import StoreError
from shardwise.store import leases
from shardwise.store.names import check_name, check_name_to_write, check_path
from shardwise.store.sequential import SequentialWriter, Stream
from shardwise.store.store import (
    LOCK_EXPIRY,
    REMOTE_TRANSFER,
    Buffer,
    FileStatus,
    StoreTraits,
)
from shardwise.store.store_url import StoreUrl

PUBLISH_PAUSE = 0.2  # seconds between two attempts to publish a file that others publish too


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory.

    Attributes:
        status: its size and version.
        modified: when the file was last modified, in seconds by the clock of the server; None if
            the file system does not say.
    """

    status: FileStatus
    modified: float | None


class RemoteFile(Protocol):
    """A file that is open for reading."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """Return bytes of the file. The range does not reach past its end."""
        ...


class RemoteFiles(Protocol):
    """A client of a remote file system. Paths begin with `/`.

    Methods raise `FileNotFoundError`, `FileExistsError`, `PermissionError` or another `OSError`.
    """

    @property
    def refuses_to_replace(self) -> bool:
        """Whether `write_new` fails if the file exists. Otherwise, a lock protects it."""
        ...

    def find(self, path: str) -> Entry:
        """Return what is at a path."""
        ...

    def list(self, path: str) -> Mapping[str, Entry]:
        """Return what is in a directory, by name."""
        ...

    def open(self, path: str, size: int | None = None) -> RemoteFile:
        """Open a file. Its size is given if it is known."""
        ...

    def create(self, path: str) -> Stream:
        """Create a file, and the directories above."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a small file atomically, and create the directories above."""
        ...

    def write_new(self, path: str, data: bytes) -> None:
        """Create a small file atomically.

        Raises:
            FileExistsError: the file exists, and `refuses_to_replace`.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file. An existing one is replaced."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...


@dataclass(frozen=True)
class RemoteFileStore:
    """Files in a directory of a remote file system.

    Files are written in order, and locks are leases.

    Args:
        files: the client of the file system.
        url: the URL of the directory.
    """

    files: RemoteFiles
    url: StoreUrl
    traits = StoreTraits(transfer=replace(REMOTE_TRANSFER, read_threads=8, staging_bytes=64 << 20))

    def __str__(self) -> str:
        return str(self.url)

    @property
    def path(self) -> str:
        """The path of the directory, which begins with `/`."""
        return f"/{self.url.path}"

    def at(self, name: str) -> RemoteFileStore:
        """Return the directory one level below."""
        check_name(name, str(self))
        return replace(self, url=self.url.below(name))

    def stat(self, path: str) -> FileStatus | None:
        """Return what is at a path."""
        check_path(path, str(self))
        try:
            return self.files.find(self._join(path)).status
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
            for name, entry in self.files.list(self._join(prefix[:-1])).items():
                if entry.status.is_directory:
                    directories.append(f"{prefix}{name}/")
                elif not leases.is_lease(name):
                    found[prefix + name] = entry.status
            if len(found) > limit:
                raise StoreError(
                    f"{self}: the directory contains more than the supported {limit} files; open "
                    "the directory of one checkpoint"
                )
        return dict(sorted(found.items()))

    def open(self, path: str, size: int | None = None) -> _Reader:
        """Open a file."""
        check_path(path, str(self))
        return _Reader(self.files.open(self._join(path), size))

    def create(self, key: str, size: int, *, replace: bool = False) -> SequentialWriter:
        """Create a file of `size` bytes; with `replace`, under a temporary name until it ends.

        It is deleted if it is closed before it is committed.
        """
        path = self._path_to_write(key)
        written = path
        if replace:
            written = self._path_to_write(f"{key}.part")
            with suppress(FileNotFoundError):
                self.files.delete(written)
        stream = self.files.create(written)

        def discard() -> None:
            with suppress(OSError):  # the file is deleted in any case
                stream.close()
            self.files.delete(written)

        return SequentialWriter(
            stream,
            size,
            f"{self}: {key}",
            finish=lambda: self.files.rename(written, path) if replace else None,
            discard=discard,
        )

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Write a small file atomically. Without `replace`, its name must be free.

        Raises:
            StoreError: other processes kept publishing this file, without success.
        """
        path = self._path_to_write(key)
        if replace:
            self.files.write(path, data)
        elif self.files.refuses_to_replace:
            self.files.write_new(path, data)
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
                        self.files.write_new(self._join(key), data)
                    self.delete(lock)
                    if is_free:
                        return
        raise StoreError(
            f"{self}: {key} cannot be published, because other processes hold its lock for "
            f"{2 * LOCK_EXPIRY:g} s; find out which job writes to this directory"
        )

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file."""
        check_name(key, str(self))
        file = self.files.open(self._join(key))
        if file.size > limit:
            raise StoreError(
                f"{self}: {key} has {file.size} bytes, but at most {limit} are expected: it is "
                "damaged, or another program wrote it"
            )
        return file.read(0, file.size)

    def list(self) -> list[str]:
        """Return the names of all files and directories, sorted. Leases are left out."""
        try:
            names = self.files.list(self.path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not leases.is_lease(name))

    def delete(self, key: str) -> None:
        """Delete a file, if it exists; with "", the directory, if it has no files and leases."""
        with suppress(FileNotFoundError):
            if key:
                self.files.delete(self._path_to_write(key))
                return
            if self.list():
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
            leases.remove_expired(self._leases())
            self.files.remove_directory(self.path)

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """Lock a file by a lease. There are no shared locks."""
        self._path_to_write(key)
        with leases.hold(self._leases(), key) as held:
            yield held

    def _leases(self) -> leases.LeasesIn:
        return leases.LeasesIn(self, self._list_times)

    def _list_times(self) -> dict[str, float]:
        """Return when each file was modified, in seconds by the clock of the server."""
        try:
            entries = self.files.list(self.path)
        except FileNotFoundError:
            return {}
        if any(entry.modified is None and leases.is_lease(name) for name, entry in entries.items()):
            raise StoreError(
                f"{self}: this file system does not tell when files were modified, so that files "
                "cannot be locked; save to another store"
            )
        return {
            name: entry.modified or 0.0
            for name, entry in entries.items()
            if not entry.status.is_directory
        }

    def _join(self, relative: str) -> str:
        return f"{self.path.rstrip('/')}/{relative}".rstrip("/") or "/"

    def _path_to_write(self, name: str) -> str:
        check_name_to_write(name, str(self))
        return self._join(name)


class _Reader:
    """A file that is open for reading."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.size = file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        count = max(0, min(len(out), self.size - offset))
        if count == 0:
            return 0
        data = self._file.read(offset, count)
        out.data[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
