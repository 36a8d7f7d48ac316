"""Stores in any file system that fsspec knows, such as SFTP."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.store.names import parse_url
from shardwise.kernel.store.store import FileStatus, not_a_directory
from shardwise.parts.stores.remote_files import Entry, ReadRange, RemoteFileStore, RequestStream

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# The names under which file systems of fsspec give the time of the last modification.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_VERSION_KEYS = ("ETag", "etag", *_TIME_KEYS)
_SMALLEST_IN_MILLISECONDS = 1e11  # a larger time is in milliseconds
_OUTAGE_NUMBERS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_MISUSE_ERRORS = (AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Errors of wrong options, or of a client that lacks a method. A later attempt fails as well."""


def open_fsspec(url: str) -> FsspecStore:
    """Return the store at a URL of fsspec.

    fsspec reads the options of a file system, such as the port of a server, from its configuration:
    `~/.config/fsspec/*.json`, or environment variables such as `FSSPEC_SFTP_PORT`.

    Args:
        url: a URL such as `sftp://server/runs/7`.

    Raises:
        StoreError: fsspec or the library of this file system is not installed, the URL is invalid,
            or fsspec does not know its scheme.
    """
    place = parse_url(url, ())
    try:
        import fsspec
    except ImportError as error:
        raise StoreError(
            f"{url!r}: {place.scheme}:// needs fsspec: pip install 'shardwise[fsspec]'"
        ) from error
    try:
        fsspec.get_filesystem_class(place.scheme)
    except ImportError as error:
        raise StoreError(f"{url!r}: fsspec cannot open {place.scheme}://: {error}") from error
    except ValueError as error:
        raise StoreError(
            f"{url!r}: unknown scheme {place.scheme}://: use a directory, file:///path, s3://, "
            "gs://, az://, hdfs://, http:// or a scheme that fsspec knows"
        ) from error
    return FsspecStore(place)


class FsspecStore(RemoteFileStore):
    """Files in a directory of a file system of fsspec.

    Most file systems replace files silently. Calls to a client that is not asynchronous are made
    one at a time, because such clients need not support threads.
    """

    def _connect(self) -> tuple[AbstractFileSystem, AbstractContextManager[object]]:
        """Return a client, and a lock for its calls."""
        import fsspec

        client = fsspec.url_to_fs(self._place(""), skip_instance_cache=True)[0]
        return client, nullcontext() if client.async_impl else threading.RLock()

    def _find(self, path: str) -> Entry:
        with self._use_client(path) as (client, full):
            client.invalidate_cache()
            return _entry(client.info(full))

    def _list(self, path: str) -> Mapping[str, Entry]:
        with self._use_client(path) as (client, full):
            client.invalidate_cache()
            found = client.ls(full, detail=True)
        own = full.rstrip("/")
        if len(found) == 1 and _path(found[0]) == own and found[0]["type"] == "file":
            raise not_a_directory(self._place(path))
        # Some object stores have an object for the directory itself.
        below = [info for info in found if _path(info) != own]
        return {_path(info).rpartition("/")[2]: _entry(info) for info in below}

    def _open(self, path: str, size: int | None) -> tuple[int, ReadRange]:
        if size is None:
            status, _ = self._find(path)
            if status.is_directory:
                raise StoreError(
                    f"{self._place(path)} is a directory, but a file is expected: open the "
                    "directory of a checkpoint"
                )
            size = status.size
        return size, partial(self._read, path)

    def _read(self, path: str, offset: int, count: int) -> bytes:
        if not count:
            return b""
        with self._use_client(path) as (client, full):
            # Without `cache_type`, a file system without ranged reads would read ahead.
            options = {} if client.async_impl else {"cache_type": "none"}
            return bytes(client.cat_file(full, start=offset, end=offset + count, **options))

    def _create(self, path: str) -> RequestStream:
        with self._use_client(path) as (client, full):
            client.invalidate_cache()
            if client.exists(full):
                raise FileExistsError(
                    errno.EEXIST,
                    "a file of this name exists, and is not replaced: save to another place",
                    self._place(path),
                )
            client.makedirs(client._parent(full), exist_ok=True)
            stream = client.open(full, "wb")
        return RequestStream(
            lambda data: self._call(path, partial(stream.write, data)),
            lambda: self._call(path, stream.close),
        )

    def _call(self, path: str, work: Callable[[], object]) -> None:
        with self._use_client(path):
            work()

    def _write(self, path: str, data: bytes, *, replace: bool) -> None:
        """Write a small file, under a temporary name if this file system can rename files.

        Raises:
            StoreError: the file has other bytes afterwards.
        """
        with self._use_client(path) as (client, full):
            client.makedirs(client._parent(full), exist_ok=True)
            if _can_rename(client):
                directory, _, name = full.rpartition("/")
                temporary = f"{directory}/.{name}.{os.urandom(4).hex()}"
                client.pipe_file(temporary, data)
                client.mv(temporary, full)
            else:
                client.pipe_file(full, data)
            if client.cat_file(full) != data:
                raise StoreError(
                    f"{self._place(path)} does not have the bytes that were written: this file "
                    "system does not replace files when it renames others; save to another store"
                )

    def _rename(self, source: str, target: str) -> None:
        """Rename a file, or copy it if this file system cannot rename files."""
        with self._use_client(source) as (client, full):
            client.mv(full, client._strip_protocol(self._place(target)))

    def _delete(self, path: str) -> None:
        with self._use_client(path) as (client, full):
            client.rm_file(full)

    def _remove_directory(self, path: str) -> None:
        """Remove an empty directory. Some stores have no directories."""
        with self._use_client(path) as (client, full):
            client.rmdir(full)

    @contextmanager
    def _use_client(self, path: str) -> Iterator[tuple[AbstractFileSystem, str]]:
        """Yield this process's client, and a path as the client writes it. Translate errors."""
        try:
            with _translate_errors(self._place(path)):
                client, lock = self._client
                with lock:
                    yield client, client._strip_protocol(self._place(path))
        except StoreUnavailableError:
            self._forget_client()  # its connection may have ended
            raise


def _entry(info: Mapping[str, Any]) -> Entry:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    time = next((info[key] for key in _TIME_KEYS if info.get(key)), None)
    is_directory = info["type"] == "directory"
    size = 0 if is_directory else int(info["size"] or 0)
    return FileStatus(size, version, is_directory), _seconds(time)


def _seconds(time: object) -> float | None:
    """Return a time of fsspec in seconds."""
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(time, (int, float)):
        return time / 1000 if time > _SMALLEST_IN_MILLISECONDS else float(time)
    return None


def _path(info: Mapping[str, Any]) -> str:
    return str(info["name"]).rstrip("/")


def _can_rename(client: AbstractFileSystem) -> bool:
    """Return whether `mv` renames a file, instead of copying it."""
    from fsspec import AbstractFileSystem

    return type(client).mv is not AbstractFileSystem.mv


@contextmanager
def _translate_errors(place: str) -> Iterator[None]:
    """Make all errors an `OSError` that names the place."""
    try:
        yield
    except StoreError:
        raise
    except NotImplementedError as error:
        raise PermissionError(errno.EROFS, f"fsspec cannot write there: {error}", place) from error
    except OSError as error:
        if error.errno is None:
            number = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}
            if type(error) in number:
                name = os.strerror(number[type(error)])
                raise type(error)(number[type(error)], name, place) from error
        if _is_outage(error):
            raise StoreUnavailableError(_describe(place, error)) from error
        raise
    except _MISUSE_ERRORS as error:
        raise StoreError(_describe(place, error)) from error
    except Exception as error:  # libraries of file systems have their own, such as paramiko's
        raise StoreUnavailableError(_describe(place, error)) from error


def _is_outage(error: OSError) -> bool:
    """Return whether an error says that the server cannot be reached."""
    without_number = type(error) is OSError and error.errno is None  # "Socket is closed"
    is_lost = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
    return is_lost or without_number or error.errno in _OUTAGE_NUMBERS


def _describe(place: str, error: Exception) -> str:
    return (
        f"{place}: fsspec failed: {type(error).__name__}: {error}; check the server, and fsspec's "
        "configuration in ~/.config/fsspec"
    )
