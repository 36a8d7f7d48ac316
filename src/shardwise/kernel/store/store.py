"""The interface of a store: see docs/ports/store.md."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardwise.kernel.errors import StoreError

Buffer = npt.NDArray[np.uint8]


LOCK_EXPIRY = 60.0
READING_GRACE = 3600.0
"""How many seconds a store without shared locks keeps the files of a removed checkpoint."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """The properties of a store that its callers must know. The defaults are those of a server.

    Attributes:
        alignment: the alignment in bytes that `write_at` needs for offsets, lengths and memory.
        lock_expiry: how many seconds the lock of a process that died can still count. 0.0 if it
            ends with the process, and if there are shared locks.
        reading_grace: how many seconds the files of a removed checkpoint stay, because processes
            may read them, and the store has no shared locks. 0.0 if readers lock what they read.
        is_node_local: whether the files are on a disk or in the memory of this node. Other nodes
            then gain nothing if this node reads for them. False if unknown.
        mapped: the files that are mapped into the memory of this process, if this is a snapshot;
            None for other stores.
        read_bytes: the length of the longest read for which the store is fastest, in bytes.
        read_threads: the reads of one process at a time.
        node_requests: the reads of all processes of a node at a time; None for no limit.
        largest_gap: the largest gap between two wanted ranges of a file for which one read of both
            is faster than two, in bytes. The store transfers about as many bytes in the time that a
            request takes to answer. 0 if a request takes no time, as in a file system.
        staging_bytes: the memory for reads, in bytes, unless the user sets a bound.
    """

    alignment: int = 1
    lock_expiry: float = LOCK_EXPIRY
    reading_grace: float = READING_GRACE
    is_node_local: bool = False
    mapped: frozenset[str] | None = None
    read_bytes: int = 8 << 20
    read_threads: int = 32
    node_requests: int | None = 32
    largest_gap: int = 1 << 20  # takes about as long as the answer to another request
    staging_bytes: int = 256 << 20


FILE_SYSTEM = StoreTraits(
    lock_expiry=0.0,
    reading_grace=0.0,
    read_bytes=2 << 20,  # stays in the CPU cache until it is verified and copied
    read_threads=4,
    node_requests=None,
    largest_gap=0,
    staging_bytes=64 << 20,
)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a store knows about a file without opening it.

    Attributes:
        size: the size in bytes; 0 for a directory.
        version: a text that changes when the content changes, such as the time of the last
            modification, or the entity tag of an object.
        is_directory: whether this is a directory. Object stores have none.
    """

    size: int
    version: str
    is_directory: bool = False


class WritableFile(Protocol):
    """A file that is being written. Its size is fixed when it is created."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset. Several threads may call this method at the same time.

        Args:
            offset: the offset in bytes, a multiple of `StoreTraits.alignment`.
            data: bytes; their number is a multiple of the alignment. Bytes after the end of the
                file are dropped.
        """
        ...

    def commit(self) -> None:
        """Make the file and its name durable, with the size that was given at its creation."""
        ...

    def close(self) -> None:
        """Close the file. Without `commit`, its content is undefined."""
        ...


class ReadableFile(Protocol):
    """An existing file."""

    @property
    def size(self) -> int:
        """The size of the file, in bytes."""
        ...

    def read_at(self, offset: int, out: Buffer) -> int:
        """Read bytes from an offset on. Several threads may call this method at the same time.

        Args:
            offset: the offset in bytes.
            out: a buffer to fill.

        Returns:
            The number of bytes read, which is smaller than the buffer only at the end of the file.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


@runtime_checkable
class ViewableFile(ReadableFile, Protocol):
    """A file whose bytes need not be copied into a buffer of the caller."""

    def view(self, offset: int, count: int) -> Buffer:
        """Return `count` bytes, which are read-only, or fewer at the end of the file."""
        ...


@runtime_checkable
class CachedFile(ReadableFile, Protocol):
    """A file that may be in the page cache, from which the kernel copies to any memory."""

    def is_cached(self, offset: int, count: int) -> bool:
        """Return whether `read_at` would copy these bytes from the page cache.

        Otherwise `read_at` is fastest if the buffer is aligned to pages.
        """
        ...


@runtime_checkable
class ReplicatedFile(ReadableFile, Protocol):
    """A file with several copies. `read_at` reads the first copy that answers."""

    @property
    def copies(self) -> int:
        """The number of copies."""
        ...

    def copy_size(self, number: int) -> int:
        """Return the size of the copy with this index, in bytes. A damaged copy can be shorter."""
        ...

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        """Read like `read_at`, but from the copy with this index only."""
        ...


class Files(Protocol):
    """A place that data files can be read from."""

    @property
    def traits(self) -> StoreTraits:
        """The properties that callers must know."""
        ...

    def open(self, path: str) -> ReadableFile:
        """Open a file; see `Store.open`."""
        ...


@runtime_checkable
class TieredFiles(Files, Protocol):
    """Files with copies in several tiers, for example in a root and its mirror."""

    def tier_to_verify(self) -> Files:
        """Return the tier whose files `Checkpoint.verify` checks."""
        ...


@runtime_checkable
class Store(Protocol):
    """The files at a place, and at all levels below.

    A key is the name of a file directly at this place. Keys that are created, published, deleted
    or locked have at most 255 ASCII letters, digits, `.`, `_` and `-`. Other names are read under
    every name that is one path component. A path is relative, with `/`; the path "" is the place
    itself.

    `str(store)` is the path or URL of the place. It ends with the name of the place, but for the
    options of a URL.

    Methods raise `StoreUnavailableError` if trying again may help, another `StoreError`, or an
    `OSError` such as `FileNotFoundError` and `PermissionError`.
    """

    @property
    def traits(self) -> StoreTraits:
        """The properties that callers must know."""
        ...

    def at(self, name: str) -> Store:
        """Return the store one level below. It need not exist yet. This makes no request."""
        ...

    def list(self) -> list[str]:
        """Return the names of all files and directories at this place, sorted.

        The result is empty if there is nothing. Locks of the store itself are left out.

        Raises:
            NotADirectoryError: a file is at this place.
        """
        ...

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the files at all levels below, by path, sorted.

        Links to files are followed. If the place is one file, the result has this file by its name.

        Args:
            limit: the largest supported number of files.

        Raises:
            StoreError: there are more files.
            OSError: a directory cannot be listed.
        """
        ...

    def stat(self, path: str) -> FileStatus | None:
        """Return what is known about a file or directory; None if there is none.

        Links are followed. Stores without directories return None for a prefix of other files.
        """
        ...

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        """Open a file for reading. Links are refused.

        Args:
            size: the size of the file, if it is known from `walk`. This can save a request.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file, as one `publish` wrote it.

        Raises:
            FileNotFoundError: there is no such file.
            StoreError: the file is larger than `limit` bytes.
        """
        ...

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """Create a file of `size` bytes, and the directories above.

        Args:
            replace: the file may exist. It keeps its content until the new one is committed, and a
                new name appears only then.

        Raises:
            FileExistsError: the file exists, and `replace` is False.
        """
        ...

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Create a small file atomically and durably, and the directories above.

        If several processes publish a file without `replace` at once, exactly one succeeds.

        Raises:
            FileExistsError: the file exists, and `replace` is False.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove a file, if it exists; with "", the place itself, if it is an empty directory.

        Raises:
            OSError: with "", the place is not empty.
        """
        ...

    def lock(self, key: str, *, shared: bool = False) -> AbstractContextManager[bool]:
        """Lock a file while a block runs. The lock ends `lock_expiry` seconds after the process.

        Args:
            key: the name of the file. An exclusive lock creates it if it does not exist.
            shared: allow other shared locks at the same time. This is never asked of stores with a
                `StoreTraits.lock_expiry`.

        Yields:
            True if the file is locked. False, without waiting, if the lock is not available, or if
            the file of a shared lock does not exist.
        """
        ...


class RepeatingStore:
    """The base of stores that repeat operations which fail for a reason that may pass."""

    def publish(
        self,
        key: str,
        data: bytes,
        *,
        replace: bool,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """See `Store.publish`.

        Args:
            check: called before each attempt. If this function raises, nothing is published.
        """
        raise NotImplementedError

    def abort_uploads(self, idle_seconds: float) -> int:
        """Abort the abandoned uploads below this place; see `abort_uploads` of this package."""
        raise NotImplementedError


class ReadOnlyStore:
    """Refuses all verbs that write. Stores that compose their files from others derive from it.

    Attributes:
        advice_to_writers: the end of the errors: why nothing can be written, or what to do instead.
    """

    advice_to_writers = "save to another store"

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """Refuse: the store is read-only."""
        raise self.refusal()

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Refuse: the store is read-only."""
        raise self.refusal()

    def delete(self, key: str) -> None:
        """Refuse: the store is read-only."""
        raise self.refusal()

    def refusal(self) -> StoreError:
        """Return the error for a verb that the store does not support."""
        return StoreError(f"{self} is read-only: {self.advice_to_writers}")


def too_large(place: object, size: int, limit: int) -> StoreError:
    """Return the error for a small file that has more bytes than it can have."""
    return StoreError(
        f"{place} has {size} bytes, but at most {limit} are expected: it is damaged, or another "
        "program wrote it: copy it from an intact source, or load another checkpoint"
    )


def too_many_files(place: object, limit: int) -> StoreError:
    """Return the error of `Store.walk` for a place with more than `limit` files."""
    return StoreError(
        f"{place}: there are more than the supported {limit} files below; open the directory of "
        "one checkpoint"
    )


def not_a_directory(place: str) -> NotADirectoryError:
    """Return the error for a file at the path or URL where the files of a store should be."""
    message = "a file is where a directory is needed: move or remove it, or use another path"
    return NotADirectoryError(errno.ENOTDIR, message, place)
