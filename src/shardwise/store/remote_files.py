"""`RemoteFileStore`: the files in a directory of a remote file system, such as HDFS."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.store import leases
from shardwise.store.names import check_name, check_name_to_write
from shardwise.store.sequential import SequentialWriter, Stream
from shardwise.store.store import (
    READING_GRACE,
    REMOTE_TRANSFER,
    Buffer,
    FileStatus,
    StoreTraits,
)

PARALLEL_REQUESTS = 8
PUBLISH_PAUSE = 0.2  # seconds between two attempts to publish a file that others publish too


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory.

    Attributes:
        size: bytes of the file; 0 for a directory.
        is_directory: whether it is a directory.
        modified: when the file was last modified, in seconds by the clock of the server; None if
            the file system does not say.
        version: as for `FileStatus`.
    """

    size: int
    is_directory: bool
    modified: float | None
    version: str


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
    def url(self) -> str:
        """URL of the root, without `/` at its end."""
        ...

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

    def write_empty(self, path: str) -> None:
        """Create or replace an empty file, and create the directories above."""
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
        path: the directory, which begins with `/`.
    """

    files: RemoteFiles
    path: str
    traits = StoreTraits(
        alignment=1,
        lock_expiry=leases.LEASE_SECONDS,
        reading_grace=READING_GRACE,
        transfer=replace(REMOTE_TRANSFER, read_threads=8, staging_bytes=64 << 20),
    )

    def __str__(self) -> str:
        return f"{self.files.url}{self.path}"

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFileStore | None:
        """The directory above; None for the root."""
        above = self.path.rstrip("/").rpartition("/")[0]
        return replace(self, path=above or "/") if self.path != "/" else None

    def at(self, name: str) -> RemoteFileStore:
        """Return the directory one level below."""
        return replace(self, path=self._path_to_read(name))

    def exists(self) -> bool:
        """Return whether there is a file or directory at the path."""
        return self._entry() is not None

    def is_file(self) -> bool:
        """Return whether there is a file at the path."""
        entry = self._entry()
        return entry is not None and not entry.is_directory

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the files at all levels below, by relative path. See `Store.walk`."""
        entry = self._entry()
        if entry is None:
            return {}
        if not entry.is_directory:
            return {self.name: FileStatus(entry.size, entry.version)}
        found: dict[str, FileStatus] = {}
        directories = [""]
        while directories:
            prefix = directories.pop()
            for name, entry in self.files.list(self._join(prefix[:-1])).items():
                if entry.is_directory:
                    directories.append(f"{prefix}{name}/")
                elif not leases.is_lease(name):
                    found[prefix + name] = FileStatus(entry.size, entry.version)
            if len(found) > limit:
                raise StoreError(
                    f"{self}: the directory contains more than the supported {limit} files; open "
                    "the directory of one checkpoint"
                )
        return dict(sorted(found.items()))

    def open(self, key: str) -> _Reader:
        """Open a file."""
        return _Reader(self.files.open(self._path_to_read(key)))

    def open_below(self, path: str, size: int | None = None) -> _Reader:
        """Open a file at any level below. See `Store.open_below`."""
        return _Reader(self.files.open(self._join(path), size))

    def create(self, key: str, size: int) -> SequentialWriter:
        """Create a file of `size` bytes. It is deleted if it is closed before it is committed."""
        path = self._path_to_write(key)
        return SequentialWriter(
            self.files.create(path),
            size,
            f"{self}: {key}",
            finish=lambda: None,
            discard=lambda: self.files.delete(path),
        )

    def create_atomic(self, key: str, size: int) -> SequentialWriter:
        """Create a file under a temporary name, and rename it when it is committed."""
        path = self._path_to_write(key)
        temporary = self._path_to_write(f"{key}.{secrets.token_hex(4)}.part")
        return SequentialWriter(
            self.files.create(temporary),
            size,
            f"{self}: {key}",
            finish=lambda: self.files.rename(temporary, path),
            discard=lambda: self.files.delete(temporary),
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
        deadline = time.monotonic() + 2 * leases.LEASE_SECONDS
        while time.monotonic() < deadline:
            if self.at(key).exists():
                raise FileExistsError(errno.EEXIST, "the file exists", f"{self}: {key}")
            # The lock is a file with the name of a temporary file. If this process dies, it is
            # removed as temporary files are.
            lock = f".{key}.00000000"
            with self.hold(lock, shared=False) as held:
                if held and not self.at(key).exists():
                    self.files.write_new(self._join(key), data)
                    self.delete(lock)
                    return
                if held:
                    self.delete(lock)
            time.sleep(PUBLISH_PAUSE)
        raise StoreError(
            f"{self}: {key} cannot be published, because other processes hold its lock for "
            f"{2 * leases.LEASE_SECONDS:g} s; find out which job writes to this directory"
        )

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file."""
        file = self.files.open(self._path_to_read(key))
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
        """Delete a file, if it exists."""
        path = self._path_to_write(key)
        with suppress(FileNotFoundError):
            self.files.delete(path)

    def remove(self) -> None:
        """Remove the directory, if it has no files and no live leases."""
        with suppress(FileNotFoundError):
            if self.list():
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
            leases.remove_expired(_Leases(self))
            self.files.remove_directory(self.path)

    def stores_with(self, key: str) -> set[str]:
        """Return the names of the directories that contain this file."""
        names = self.list()
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            found = list(pool.map(lambda name: self.at(name).at(key).is_file(), names))
        return {name for name, is_there in zip(names, found, strict=True) if is_there}

    def is_writable(self) -> bool:
        """Return whether this user may create files here, by creating and deleting one.

        Raises:
            StoreUnavailableError: the server does not answer, so this is unknown.
        """
        existing: RemoteFileStore | None = self
        while existing is not None and not existing.exists():
            existing = existing.parent
        probe = (existing or self)._path_to_write(f".writable-{secrets.token_hex(4)}")
        try:
            self.files.write_empty(probe)
            self.files.delete(probe)
        except StoreUnavailableError:
            raise
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Do nothing: the file system makes names durable."""

    @contextmanager
    def hold(self, key: str, *, shared: bool) -> Iterator[bool]:
        """Lock a file by a lease. A shared lock needs none."""
        if shared:
            yield self.at(key).is_file()
            return
        self._path_to_write(key)
        with leases.hold(_Leases(self), key) as held:
            yield held

    def _entry(self) -> Entry | None:
        try:
            return self.files.find(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _join(self, relative: str) -> str:
        return f"{self.path.rstrip('/')}/{relative}".rstrip("/") or "/"

    def _path_to_read(self, name: str) -> str:
        check_name(name, str(self))
        return self._join(name)

    def _path_to_write(self, name: str) -> str:
        check_name_to_write(name, str(self))
        return self._join(name)


@dataclass(frozen=True, slots=True)
class _Leases:
    """The leases in a directory."""

    store: RemoteFileStore

    def touch(self, name: str) -> None:
        self.store.files.write_empty(self.store._path_to_write(name))

    def create_empty(self, name: str) -> None:
        if not self.store.at(name).exists():
            self.touch(name)

    def modification_times(self, prefix: str) -> dict[str, float]:
        try:
            entries = self.store.files.list(self.store.path)
        except FileNotFoundError:
            return {}
        times = {}
        for name, entry in entries.items():
            if name.startswith(prefix) and not entry.is_directory:
                if entry.modified is None and leases.is_lease(name):
                    raise StoreError(
                        f"{self.store}: this file system does not tell when files were modified, "
                        "so that files cannot be locked; save to another store"
                    )
                times[name] = entry.modified or 0.0
        return times

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.store.files.delete(self.store._path_to_write(name))


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
