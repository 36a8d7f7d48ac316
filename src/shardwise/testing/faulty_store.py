"""A store for fault tests. It counts operations; at one, it raises or kills the process."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from shardwise.store.local import LocalStore
from shardwise.store.store import Buffer, FileStatus, ReadableFile, Store, StoreTraits, WritableFile

Action = Callable[[str], None]


def kill_process(operation: str) -> None:
    """Kill this process, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def make_os_error_action(error_number: int) -> Action:
    """Return an action that raises an `OSError` with an error number, such as `errno.ENOSPC`."""

    def raise_os_error(operation: str) -> None:
        raise OSError(error_number, os.strerror(error_number), operation)

    return raise_os_error


@dataclass(slots=True)
class Fault:
    """A fault to inject before an operation. A store and all stores below it share the fault.

    Args:
        index: index of the operation before which `action` is called, counted from 0; None to only
            count operations.
        action: the function to call. Its argument is the name of the operation: `verb key`.
        verbs: the verbs of the operations to count; all if empty.
        sticky: whether to call `action` before all later operations too, as on a full disk.

    Attributes:
        operations: the names of the operations so far.
    """

    index: int | None = None
    action: Action = kill_process
    verbs: tuple[str, ...] = ()
    sticky: bool = False
    operations: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_operation(self, verb: str, key: str) -> None:
        """Count an operation that will happen next. Inject the fault if it belongs before it."""
        if self.verbs and verb not in self.verbs:
            return
        name = f"{verb} {key}"
        with self._lock:
            index = len(self.operations)
            self.operations.append(name)
        if self.index is not None and (index == self.index or (self.sticky and index > self.index)):
            self.action(name)


class FaultyStore:
    """Wraps a store, and reports every operation to a `Fault` before it happens."""

    def __init__(self, store: Store, fault: Fault) -> None:
        self._store = store
        self._fault = fault

    def __str__(self) -> str:
        return str(self._store)

    @property
    def traits(self) -> StoreTraits:
        """The traits of the wrapped store."""
        return self._store.traits

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self._store.name

    @property
    def parent(self) -> FaultyStore | None:
        """The store one level above, with the same fault."""
        parent = self._store.parent
        return None if parent is None else FaultyStore(parent, self._fault)

    def at(self, name: str) -> FaultyStore:
        """Return the store one level below, with the same fault."""
        return FaultyStore(self._store.at(name), self._fault)

    def exists(self) -> bool:
        """Return whether there is a file or directory."""
        self._fault.count_operation("exists", "")
        return self._store.exists()

    def is_file(self) -> bool:
        """Return whether the place is one file."""
        self._fault.count_operation("is_file", "")
        return self._store.is_file()

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the files at all levels below."""
        self._fault.count_operation("walk", "")
        return self._store.walk(limit)

    def open_below(self, path: str, size: int | None = None) -> ReadableFile:
        """Open a file at any level below."""
        self._fault.count_operation("open", path)
        return _FaultyReader(self._store.open_below(path, size), path, self._fault)

    def create(self, key: str, size: int) -> WritableFile:
        """Begin a new file."""
        self._fault.count_operation("create", key)
        return _FaultyWriter(self._store.create(key, size), key, self._fault)

    def create_atomic(self, key: str, size: int) -> WritableFile:
        """Begin a file that appears when it is committed."""
        self._fault.count_operation("create", key)
        return _FaultyWriter(self._store.create_atomic(key, size), key, self._fault)

    def open(self, key: str) -> ReadableFile:
        """Open a file."""
        self._fault.count_operation("open", key)
        return _FaultyReader(self._store.open(key), key, self._fault)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Publish a small file. The system calls of a `LocalStore` count as operations too."""
        self._fault.count_operation("publish", key)
        if isinstance(self._store, LocalStore):
            with _count_system_calls(self._fault):
                self._store.publish(key, data, replace=replace)
        else:
            self._store.publish(key, data, replace=replace)
        self._fault.count_operation("published", key)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file."""
        self._fault.count_operation("read", key)
        return self._store.read(key, limit=limit)

    def list(self) -> list[str]:
        """Return the names of the files and stores below."""
        self._fault.count_operation("list", "")
        return self._store.list()

    def delete(self, key: str) -> None:
        """Delete a file."""
        self._fault.count_operation("delete", key)
        self._store.delete(key)

    def remove(self) -> None:
        """Remove this store, if it is empty."""
        self._fault.count_operation("remove", "")
        self._store.remove()

    def stores_with(self, key: str) -> set[str]:
        """Return the names of the stores below that contain this file."""
        self._fault.count_operation("stores_with", key)
        return self._store.stores_with(key)

    def is_writable(self) -> bool:
        """Return whether files can be created here."""
        return self._store.is_writable()

    def sync(self) -> None:
        """Make the directory entries of all files durable."""
        self._fault.count_operation("sync", "")
        self._store.sync()

    def hold(self, key: str, *, shared: bool) -> AbstractContextManager[bool]:
        """Lock a file."""
        self._fault.count_operation("hold", key)
        return self._store.hold(key, shared=shared)


class _FaultyWriter:
    def __init__(self, file: WritableFile, key: str, fault: Fault) -> None:
        self._file = file
        self._key = key
        self._fault = fault

    def write_at(self, offset: int, data: Buffer) -> None:
        self._fault.count_operation("write_at", self._key)
        self._file.write_at(offset, data)

    def commit(self) -> None:
        self._fault.count_operation("commit", self._key)
        self._file.commit()

    def close(self) -> None:
        self._file.close()


class _FaultyReader:
    def __init__(self, file: ReadableFile, key: str, fault: Fault) -> None:
        self._file = file
        self._key = key
        self._fault = fault

    @property
    def size(self) -> int:
        return self._file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        self._fault.count_operation("read_at", self._key)
        return self._file.read_at(offset, out)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _count_system_calls(fault: Fault) -> Iterator[None]:
    """Count the system calls of a publication as operations of the fault."""
    with (
        mock.patch.multiple(
            os,
            fsync=_with_counting(os.fsync, "fsync", fault),
            replace=_with_counting(os.replace, "replace", fault),
            link=_with_counting(os.link, "link", fault),
        ),
        mock.patch.object(Path, "unlink", _with_counting(Path.unlink, "unlink", fault)),
    ):
        yield


def _with_counting(call: Callable[..., object], verb: str, fault: Fault) -> Callable[..., object]:
    def counted_call(*args: object, **kwargs: object) -> object:
        fault.count_operation(verb, "")
        return call(*args, **kwargs)

    return counted_call


FULL_DISK = make_os_error_action(errno.ENOSPC)
READ_ONLY = make_os_error_action(errno.EROFS)
