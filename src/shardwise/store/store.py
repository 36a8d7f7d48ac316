"""The interface of a store, and its optional capabilities."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a store is read fastest.

    Attributes:
        read_bytes: the longest read, in bytes.
        read_threads: the reads of one process at a time.
        node_requests: the reads of all processes of a node at a time; None for no limit.
        largest_gap: the largest gap between two wanted ranges of a file for which one read of both
            is faster than two, in bytes. The store transfers about as many bytes in the time that a
            request takes to answer. 0 if a request takes no time, as in a file system.
        staging_bytes: the memory for reads, in bytes, unless the user sets a bound.
    """

    read_bytes: int
    read_threads: int
    node_requests: int | None
    largest_gap: int
    staging_bytes: int


LOCAL_TRANSFER = TransferOptions(
    read_bytes=2 << 20,  # small enough to stay in the CPU cache until it is verified and copied
    read_threads=4,
    node_requests=None,
    largest_gap=0,
    staging_bytes=64 << 20,
)
REMOTE_TRANSFER = TransferOptions(
    read_bytes=8 << 20,
    read_threads=32,
    node_requests=32,
    largest_gap=1 << 20,  # takes about as long as the answer to another request
    staging_bytes=256 << 20,
)
READING_GRACE = 3600.0
"""How many seconds a store without shared locks keeps the files of a removed checkpoint."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """The properties of a store that its callers must know.

    Attributes:
        alignment: the alignment in bytes that `write_at` needs for offsets, lengths and memory.
        lock_expiry: how many seconds the lock of a process that died can still count. 0.0 if it
            ends with the process.
        reading_grace: how many seconds the files of a removed checkpoint stay, because processes
            may read them, and the store has no shared locks. 0.0 if readers lock what they read.
        transfer: how the store is read fastest.
        is_node_local: whether the files are on a disk or in the memory of this node. Other nodes
            then gain nothing if this node reads for them. False if unknown.
    """

    alignment: int
    lock_expiry: float
    reading_grace: float
    transfer: TransferOptions
    is_node_local: bool = False


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a store knows about a file without opening it.

    Attributes:
        size: the size in bytes.
        version: a text that changes when the content changes, such as the time of the last
            modification, or the entity tag of an object.
    """

    size: int
    version: str


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
        """Make the file durable, with the size that was given at its creation."""
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

    def open(self, key: str) -> ReadableFile:
        """Open a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...


@runtime_checkable
class Store(Files, Protocol):
    """A flat set of files in one place.

    Names of files that are created, published or deleted have at most 255 ASCII letters, digits,
    `.`, `_` and `-`. `at`, `open` and `read` accept every name that is one path component.

    Every method raises `StoreError`, or an `OSError` such as `FileNotFoundError` and
    `FileExistsError`.
    """

    @property
    def name(self) -> str:
        """The last component of the path; "" at the top."""
        ...

    @property
    def parent(self) -> Store | None:
        """The store one level above; None at the top."""
        ...

    def at(self, name: str) -> Store:
        """Return the store one level below. It need not exist yet."""
        ...

    def exists(self) -> bool:
        """Return whether there is a file or directory at this place.

        Stores without directories return whether there are files at this place or below.
        """
        ...

    def is_file(self) -> bool:
        """Return whether this place is one file. Links are followed."""
        ...

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the files at all levels below, by relative path with `/`, sorted by path.

        Links to files are followed. If the place is one file, the result has this file by its name.

        Args:
            limit: the largest supported number of files.

        Raises:
            StoreError: there are more files.
            OSError: a directory cannot be listed.
        """
        ...

    def open_below(self, path: str, size: int | None = None) -> ReadableFile:
        """Open a file at any level below for reading. Links are followed.

        Args:
            path: the relative path with `/`; "" opens the place itself, if it is one file.
            size: the size of the file, if it is known from `walk`. This can save a request.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def create(self, key: str, size: int) -> WritableFile:
        """Create a file of `size` bytes.

        Raises:
            FileExistsError: the file exists.
        """
        ...

    def create_atomic(self, key: str, size: int) -> WritableFile:
        """Create or replace a file, which appears under its name only when it is committed."""
        ...

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Make all earlier files durable, then create a small file atomically and durably.

        Raises:
            FileExistsError: the file exists, and `replace` is False.
        """
        ...

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file.

        Raises:
            FileNotFoundError: there is no such file.
            StoreError: the file is larger than `limit` bytes.
        """
        ...

    def list(self) -> list[str]:
        """Return the names of all files and stores below, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove a file, if it exists."""
        ...

    def remove(self) -> None:
        """Remove this store itself, if it is empty."""
        ...

    def stores_with(self, key: str) -> set[str]:
        """Return the names of the stores one level below that contain this file.

        This needs far fewer requests than to list each of these stores.
        """
        ...

    def is_writable(self) -> bool:
        """Return whether this process may create files here. The store need not exist yet."""
        ...

    def sync(self) -> None:
        """Make the names of all files durable."""
        ...

    def hold(self, key: str, *, shared: bool) -> AbstractContextManager[bool]:
        """Lock a file while a block runs. The lock ends when the process dies.

        Stores with a `StoreTraits.lock_expiry` have no shared locks. There, `shared=True` only
        finds out whether the file exists.

        Args:
            key: the name of the file. An exclusive lock creates it if it does not exist.
            shared: allow other shared locks at the same time. Otherwise, the lock is exclusive.

        Yields:
            True if the file is locked. False, without waiting, if the lock is not available.
        """
        ...


@runtime_checkable
class MappedStore(Store, Protocol):
    """A store with files in memory."""

    def is_mapped(self, key: str) -> bool:
        """Return whether `open` returns a file that is mapped into memory."""
        ...


@runtime_checkable
class UploadingStore(Store, Protocol):
    """A store whose files are uploaded in parts, several at a time."""

    def abort_uploads(self) -> int:
        """Abort the abandoned uploads of all files below, and return how many there were.

        The store keeps the parts of an interrupted upload until somebody aborts it.
        """
        ...

    def divide_uploads(self, processes: int) -> Store:
        """Return the same store, for one of several processes of this node that write together.

        Args:
            processes: how many processes divide the upload requests of the node.
        """
        ...


@runtime_checkable
class BoundedStore(Store, Protocol):
    """A store with limited space."""

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written; None if unknown."""
        ...
