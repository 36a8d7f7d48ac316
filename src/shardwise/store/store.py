"""What a store can do: few verbs, and stated capabilities."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]


class WritableFile(Protocol):
    """A new file, of a size that was stated when it was created."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write at a multiple of the store's alignment; the length is one too, also at the end.

        What lies past the file's stated size is dropped. Calls from several threads may overlap.
        """
        ...

    def commit(self) -> None:
        """Make what was written durable, at its stated size."""
        ...

    def close(self) -> None:
        """Let go of it. Without `commit`, nothing is promised of its content."""
        ...


class ReadableFile(Protocol):
    """An existing file."""

    @property
    def size(self) -> int:
        """In bytes."""
        ...

    def read_at(self, offset: int, out: Buffer) -> int:
        """Fill `out` from `offset` on; returns the bytes read, fewer only at the end of the file.

        Calls from several threads may overlap.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


@runtime_checkable
class MappedFile(ReadableFile, Protocol):
    """A file that lies in memory."""

    def view(self, offset: int, count: int) -> Buffer:
        """Its bytes, where they lie; fewer only at the end of the file. They are only read."""
        ...


@runtime_checkable
class ReplicatedFile(ReadableFile, Protocol):
    """A file of which there are several copies; `read_at` takes the first that answers."""

    @property
    def copies(self) -> int:
        """How many there are."""
        ...

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        """As `read_at`, from one of them only; the first is number 0."""
        ...


class Files(Protocol):
    """What data files are read from."""

    def open(self, key: str) -> ReadableFile:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
        """
        ...


@runtime_checkable
class Store(Files, Protocol):
    """A flat set of files under one place.

    Names of files that are created, published or deleted consist of at most 255 ASCII letters,
    digits, `.`, `_` and `-`. `at`, `open` and `read` take every name that is one path component.

    Every verb raises `StoreError`, or one of the builtin errors of `OSError` that it derives
    from: `FileNotFoundError`, `FileExistsError`.
    """

    @property
    def alignment(self) -> int:
        """`write_at` wants offsets, lengths and memory aligned to this many bytes."""
        ...

    def at(self, name: str) -> Store:
        """The store one level below, which need not exist yet."""
        ...

    def create(self, key: str, size: int) -> WritableFile:
        """Begin a new file of `size` bytes.

        Raises:
            FileExistsError: there is one of this name.
        """
        ...

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Make a small file appear, durable and whole, or not at all, and all others before it.

        Raises:
            FileExistsError: there is one of this name, and `replace` is False.
        """
        ...

    def read(self, key: str, *, limit: int) -> bytes:
        """All of a small file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it is larger than `limit` bytes.
        """
        ...

    def list(self) -> list[str]:
        """The names of the files and of the stores below, sorted; empty where nothing is."""
        ...

    def delete(self, key: str) -> None:
        """Remove a file; one that is not there is as good as removed."""
        ...

    def remove(self) -> None:
        """Remove this store itself, if it is empty."""
        ...

    def sync(self) -> None:
        """Make the presence of all files durable."""
        ...

    def hold(self, key: str, *, shared: bool) -> AbstractContextManager[bool]:
        """Hold a file for as long as the block runs; it is let go also if the process dies.

        A file that is held shared cannot be held exclusively; an exclusive hold creates the file
        if need be. Yields False, at once, where it could not be had.
        """
        ...


@runtime_checkable
class MappedStore(Store, Protocol):
    """A store of which files lie in memory."""

    def is_mapped(self, key: str) -> bool:
        """Whether `open` gives this file as a `MappedFile`."""
        ...


@runtime_checkable
class BoundedStore(Store, Protocol):
    """A store that knows how much it has room for."""

    def free_bytes(self) -> int | None:
        """The bytes that can still be written; None if that is not known."""
        ...
