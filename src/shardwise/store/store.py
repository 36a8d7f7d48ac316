"""The methods of a store, and its optional capabilities."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]


class WritableFile(Protocol):
    """A new file, whose size is given at its creation."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write `data` at a multiple of the store's alignment. Its length is a multiple, too.

        Bytes past the file's size are dropped. Several threads may call it at the same time.
        """
        ...

    def commit(self) -> None:
        """Make the file durable, at its given size."""
        ...

    def close(self) -> None:
        """Close the file. Without `commit`, its content is undefined."""
        ...


class ReadableFile(Protocol):
    """An existing file."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        ...

    def read_at(self, offset: int, out: Buffer) -> int:
        """Fill `out` from `offset` on. Returns the bytes read, fewer only at the end of the file.

        Several threads may call it at the same time.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


@runtime_checkable
class MappedFile(ReadableFile, Protocol):
    """A file in memory."""

    def view(self, offset: int, count: int) -> Buffer:
        """Return a read-only view of its bytes; fewer only at the end of the file."""
        ...


@runtime_checkable
class ReplicatedFile(ReadableFile, Protocol):
    """A file with several copies. `read_at` reads the first copy that answers."""

    @property
    def copies(self) -> int:
        """Number of copies."""
        ...

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        """Read like `read_at`, but only from one copy; the first is number 0."""
        ...


class Files(Protocol):
    """A source of data files."""

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
    def alignment(self) -> int:
        """Bytes to which `write_at` needs offsets, lengths and memory aligned."""
        ...

    def at(self, name: str) -> Store:
        """Return the store one level below, which need not exist yet."""
        ...

    def create(self, key: str, size: int) -> WritableFile:
        """Create a file of `size` bytes.

        Raises:
            FileExistsError: the file exists.
        """
        ...

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Create a small file atomically and durably, after making all earlier files durable.

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

    def sync(self) -> None:
        """Make the names of all files durable."""
        ...

    def hold(self, key: str, *, shared: bool) -> AbstractContextManager[bool]:
        """Lock a file for the length of a block, or until the process dies.

        An exclusive lock excludes all others, and creates the file if it does not exist. Yields
        False, without waiting, if the lock is not available.
        """
        ...


@runtime_checkable
class MappedStore(Store, Protocol):
    """A store with files in memory."""

    def is_mapped(self, key: str) -> bool:
        """Return whether `open` returns this file as a `MappedFile`."""
        ...


@runtime_checkable
class BoundedStore(Store, Protocol):
    """A store that knows its free space."""

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written; None if unknown."""
        ...
