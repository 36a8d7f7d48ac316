"""Stores on other machines: which one is at a URL, and `RetryingStore`, which is around each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.plugins import call_plugin, find_plugin
from shardwise.kernel.store.local import LocalStore
from shardwise.kernel.store.local_files import nearest_existing
from shardwise.kernel.store.names import parse_url, scheme_of
from shardwise.kernel.store.places import PLUGINS, open_store
from shardwise.kernel.store.store import (
    Buffer,
    FileStatus,
    ReadableFile,
    RepeatingStore,
    Store,
    StoreTraits,
    ViewableFile,
    WritableFile,
)
from shardwise.parts.stores.object_clients import find_settings
from shardwise.parts.stores.object_store import ObjectStore, parse_object_url
from shardwise.parts.stores.retry import Retry
from shardwise.ports.lease_locks import lease_name

T = TypeVar("T")
OBJECT_SCHEMES = ("s3", "gs", "az", "http", "https")


def open_remote(url: str) -> RetryingStore:
    """Return the store at the URL of another machine, by a plug-in if one has the scheme.

    Raises:
        StoreError: the URL is wrong, or needs a package that is not installed.
    """
    store = _open_once(url, scheme_of(url))
    return RetryingStore(store, Retry(parse_url(url, None, needs_host=False).retry_seconds))


def _open_once(url: str, scheme: str | None) -> Store:
    if scheme in OBJECT_SCHEMES:
        return ObjectStore(url)
    if scheme == "hdfs":
        from shardwise.parts.stores.hdfs import open_hdfs

        return open_hdfs(url)
    plugin = find_plugin(PLUGINS, scheme or "")
    if plugin is not None:
        store = call_plugin(plugin, Store, url)  # type: ignore[type-abstract]
        if store is None:
            raise StoreError(f"{url}: {plugin.value} returned no store")
        return store
    from shardwise.parts.stores.fsspec_store import open_fsspec

    return open_fsspec(url)


def open_absolute(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store at a place, with a name that means the same in every process of this node.

    A relative path is made absolute. The URL of an object store gets the endpoint, profile or
    account that this process finds in its environment.

    Raises:
        StoreError: as for `open_store`.
    """
    store = open_store(place)
    if type(store) is LocalStore:
        return store.at_path(store.path.absolute())
    if scheme_of(str(store)) not in OBJECT_SCHEMES or not can_be_reopened(store):
        return store
    url = parse_object_url(str(store))
    found = find_settings(url)
    return open_store(str(replace(url, options={**url.options, **found}))) if found else store


def can_be_reopened(store: Store) -> bool:
    """Return whether `open_store(str(store))` opens the same store, also in another process."""
    try:
        return type(_unwrapped(open_store(str(store)))) is type(_unwrapped(store))
    except StoreError:
        return False


def _unwrapped(store: Store) -> Store:
    return store.store if isinstance(store, RetryingStore) else store


def is_writable(store: Store) -> bool:
    """Return whether this process may create files at a place, which need not exist yet.

    On other machines, the function creates and deletes a file.

    Raises:
        StoreUnavailableError: the storage does not answer, so this is unknown.
    """
    if isinstance(store, LocalStore):
        return os.access(nearest_existing(store.path), os.W_OK)
    name = lease_name("writable")  # listings leave it out
    try:
        store.publish(name, b"", replace=True)
    except StoreUnavailableError:
        raise
    except OSError:
        return False
    with suppress(OSError):
        store.delete(name)
    return True


class RetryingStore(RepeatingStore):
    """Repeats the operations of another store while it does not answer.

    A file that this store wrote a moment ago is looked for again if the server does not find it. If
    the answer to `publish` is lost, the file is read: `data` must include a random number that no
    other process uses. `create`, and the writes and the commit of the file that it returns, are not
    repeated, because they may have had an effect when they fail.

    Args:
        store: the other store, which raises `StoreUnavailableError` if trying again may help.
        retry: how long to repeat; shared with the stores below.
    """

    def __init__(self, store: Store, retry: Retry) -> None:
        self.store = store
        self._retry = retry

    def __repr__(self) -> str:
        return repr(self.store)

    def __str__(self) -> str:
        return str(self.store)

    @property
    def retries(self) -> int:
        """How many requests were repeated so far, here and in the stores that share the retry."""
        return self._retry.repeated

    @property
    def traits(self) -> StoreTraits:
        """The traits of the other store."""
        return self.store.traits

    def at(self, name: str) -> RetryingStore:
        """Return the store one level below."""
        return RetryingStore(self.store.at(name), self._retry)

    def list(self) -> list[str]:
        """See `Store.list`."""
        return self._repeat(None, self.store.list)

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """See `Store.walk`."""
        return self._repeat(None, lambda: self.store.walk(limit))

    def stat(self, path: str) -> FileStatus | None:
        """See `Store.stat`."""

        def find() -> FileStatus:
            status = self.store.stat(path)
            if status is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", self._place(path))
            return status

        try:
            return self._repeat(path, find)
        except FileNotFoundError:
            return None

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        """See `Store.open`."""
        file = self._repeat(path, lambda: self.store.open(path, size))
        kind = _ViewableFile if isinstance(file, ViewableFile) else _ReadableFile
        return kind(file, partial(self._repeat, path))

    def read(self, key: str, *, limit: int) -> bytes:
        """See `Store.read`."""
        return self._repeat(key, lambda: self.store.read(key, limit=limit))

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """See `Store.create`."""
        file = self.store.create(key, size, replace=replace)
        return _WritableFile(file, lambda: self._retry.note_write(self._place(key)))

    def publish(
        self,
        key: str,
        data: bytes,
        *,
        replace: bool,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """See `RepeatingStore.publish`."""

        def publish() -> None:
            check()
            try:
                self.store.publish(key, data, replace=replace)
            except (FileExistsError, StoreUnavailableError) as failure:
                if replace or self._has_failed(key, data, failure):
                    raise

        self._repeat(key, publish)
        self._retry.note_write(self._place(key))

    def abort_uploads(self, idle_seconds: float) -> int:
        """See `ObjectStore.abort_uploads`. Only S3 can list unfinished uploads."""
        if isinstance(self.store, ObjectStore) and self.store.url.scheme == "s3":
            return self.store.abort_uploads(idle_seconds)
        return 0

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._retry.forget_write(self._place(key))
        self._repeat(key, lambda: self.store.delete(key))

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """See `Store.lock`. Only the attempt to lock is repeated."""
        with ExitStack() as locks:
            yield self._repeat(
                key, lambda: locks.enter_context(self.store.lock(key, shared=shared))
            )

    def _repeat(self, path: str | None, act: Callable[[], T]) -> T:
        """Return the result of an operation on a file; on all files here if `path` is None."""
        place = None if path is None else self._place(path)
        return self._retry.call(act, lambda: self._retry.has_written(place))

    def _has_failed(self, key: str, data: bytes, failure: OSError) -> bool:
        """Return whether a file was not published: read it, and compare its data.

        Raises:
            FileExistsError: the file has other content.
            StoreUnavailableError: the server says that the file exists, and does not find it.
        """
        try:
            found = self.store.read(key, limit=len(data))
        except FileNotFoundError:
            if isinstance(failure, FileExistsError):
                raise StoreUnavailableError(
                    f"{self._place(key)}: cannot tell whether the file was written: the server "
                    "says that it exists, and does not find it; check the storage, and try again"
                ) from failure
            return True
        except StoreUnavailableError:
            raise
        except StoreError:  # it is larger
            found = None
        if found == data:
            return False
        raise FileExistsError(
            errno.EEXIST,
            "a file of this name exists already: save again, or remove the file",
            self._place(key),
        )

    def _place(self, path: str) -> str:
        """Return the URL of a file without options."""
        place = str(self.store).partition("?")[0]
        return f"{place}/{path}" if path else place


class _ReadableFile:
    def __init__(self, file: ReadableFile, repeat: Callable[[Callable[[], Any]], Any]) -> None:
        self._file, self._repeat = file, repeat
        self.size = file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        count: int = self._repeat(lambda: self._file.read_at(offset, out))
        return count

    def close(self) -> None:
        self._file.close()


class _ViewableFile(_ReadableFile):
    _file: ViewableFile

    def view(self, offset: int, count: int) -> Buffer:
        found: Buffer = self._repeat(lambda: self._file.view(offset, count))
        return found


class _WritableFile:
    def __init__(self, file: WritableFile, note_write: Callable[[], object]) -> None:
        self._file, self._note_write = file, note_write

    def write_at(self, offset: int, data: Buffer) -> None:
        self._file.write_at(offset, data)

    def commit(self) -> None:
        self._file.commit()
        self._note_write()

    def close(self) -> None:
        self._file.close()
