"""A store that passes every operation to another store through one method, to inject faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from shardwise.kernel.store.store import (
    Buffer,
    FileStatus,
    ReadableFile,
    Store,
    StoreTraits,
    ViewableFile,
    WritableFile,
)

T = TypeVar("T")


class WrappedStore:
    """Passes every operation to another store. Derived classes override `run`, and `at`.

    Args:
        store: the other store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def run(self, operation: str, path: str, act: Callable[[], T]) -> T:
        """Return the result of an operation.

        Args:
            operation: a method of `Store`; or `read_at`, `view`, `write_at` or `commit`.
            path: the file; "" for the place itself.
            act: calls the other store.
        """
        return act()

    def __str__(self) -> str:
        return str(self.store)

    @property
    def traits(self) -> StoreTraits:
        """The traits of the other store."""
        return self.store.traits

    def at(self, name: str) -> WrappedStore:
        """Return the store one level below."""
        raise NotImplementedError

    def list(self) -> list[str]:
        """See `Store.list`."""
        return self.run("list", "", self.store.list)

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """See `Store.walk`."""
        return self.run("walk", "", lambda: self.store.walk(limit))

    def stat(self, path: str) -> FileStatus | None:
        """See `Store.stat`."""
        return self.run("stat", path, lambda: self.store.stat(path))

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        """See `Store.open`."""
        file = self.run("open", path, lambda: self.store.open(path, size))
        if isinstance(file, ViewableFile):
            return _ViewableFile(file, path, self)
        return _ReadableFile(file, path, self)

    def read(self, key: str, *, limit: int) -> bytes:
        """See `Store.read`."""
        return self.run("read", key, lambda: self.store.read(key, limit=limit))

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """See `Store.create`."""
        file = self.run("create", key, lambda: self.store.create(key, size, replace=replace))
        return _WritableFile(file, key, self)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """See `Store.publish`."""
        self.run("publish", key, lambda: self.store.publish(key, data, replace=replace))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.run("delete", key, lambda: self.store.delete(key))

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """See `Store.lock`. Only the attempt to lock counts as an operation."""
        with ExitStack() as locks:
            yield self.run(
                "lock", key, lambda: locks.enter_context(self.store.lock(key, shared=shared))
            )


class _ReadableFile:
    def __init__(self, file: ReadableFile, path: str, store: WrappedStore) -> None:
        self._file, self._path, self._store = file, path, store
        self.size = file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        return self._store.run("read_at", self._path, lambda: self._file.read_at(offset, out))

    def close(self) -> None:
        self._file.close()


class _ViewableFile(_ReadableFile):
    def __init__(self, file: ViewableFile, path: str, store: WrappedStore) -> None:
        super().__init__(file, path, store)
        self._viewable = file

    def view(self, offset: int, count: int) -> Buffer:
        return self._store.run("view", self._path, lambda: self._viewable.view(offset, count))


class _WritableFile:
    def __init__(self, file: WritableFile, key: str, store: WrappedStore) -> None:
        self._file, self._key, self._store = file, key, store

    def write_at(self, offset: int, data: Buffer) -> None:
        self._store.run("write_at", self._key, lambda: self._file.write_at(offset, data))

    def commit(self) -> None:
        self._store.run("commit", self._key, self._file.commit)

    def close(self) -> None:
        self._file.close()
