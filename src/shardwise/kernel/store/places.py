"""Functions for all stores: open the one at a path or URL, ask what is there, keep secrets."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from shardwise.kernel.errors import StoreError
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.store.local import LocalStore
from shardwise.kernel.store.local_files import (
    is_private,
    nearest_existing,
    read_regular,
    write_atomically,
)
from shardwise.kernel.store.names import parse_url, scheme_of
from shardwise.kernel.store.store import RepeatingStore, Store

PLUGINS = "shardwise.stores"
_SCHEMES = (
    *("s3", "gs", "az", "http", "https"),
    *("file", "hdfs", "webhdfs", "s3a", "s3n", "gcs", "abfs", "abfss", "adl", "wasb", "wasbs"),
    *("memory", "sftp", "ssh", "ftp", "smb", "oci", "oss", "dbfs", "hf", "r2"),
)


def publish_checked(
    store: Store, key: str, data: bytes, *, replace: bool, check: Callable[[], object]
) -> None:
    """Publish a small file as `Store.publish` does, and call `check` before each attempt.

    Raises:
        Exception: of `check`. Then this attempt publishes nothing.
        OSError: as for `Store.publish`.
    """
    if isinstance(store, RepeatingStore):
        store.publish(key, data, replace=replace, check=check)
    else:
        check()
        store.publish(key, data, replace=replace)


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store at a directory or URL. A store is returned unchanged.

    Raises:
        StoreError: the place is not a path, URL or store; a path is not UTF-8; or a URL is wrong,
            or needs a package that is not installed.
    """
    if isinstance(place, Store):
        return place
    path = os.fspath(place) if isinstance(place, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise StoreError(f"{place!r}: expected a path, a URL or a store")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise StoreError(
            f"{path!r} is not a path in UTF-8: rename the directory, or use a link to it"
        ) from error
    if path.startswith("~"):
        raise StoreError(f"{path!r}: only shells expand ~; pass os.path.expanduser({path!r})")
    scheme = scheme_of(path)
    if scheme is None:
        if ":" in path:
            _refuse_shortened_url(path)
        return LocalStore(path)
    if scheme == "file":
        return _open_file_url(path)
    store: Store = load_built_in(PLUGINS, "remote")(path)
    return store


def count_retries(store: object) -> int:
    """Return how many requests a store has repeated so far; 0 for stores that repeat none."""
    retries: int = getattr(store, "retries", 0)
    return retries


def _refuse_shortened_url(path: str) -> None:
    """Refuse `s3:/bucket/run`, which `pathlib.Path("s3://bucket/run")` becomes.

    Raises:
        StoreError: a known scheme and a colon begin the path, without `//`.
    """
    scheme, _, rest = path.partition(":")
    if scheme.lower() in _SCHEMES:
        slashes = "///" if scheme.lower() == "file" else "//"
        url = f"{scheme}:{slashes}{rest.lstrip('/')}"
        raise StoreError(
            f"{path!r} looks like a URL that lost a slash, as in a pathlib.Path: pass the string "
            f"{url!r}; for a local directory of this name, pass {f'./{path}'!r}"
        )


def _open_file_url(place: str) -> LocalStore:
    if not place[len("file://") :].startswith("/"):
        raise StoreError(f"{place!r}: a file URL names no host: use file:///path, or the path")
    url = parse_url(place, ("page_cache",), needs_host=False)
    return LocalStore(f"/{url.path}", page_cache=url.is_set("page_cache"))


def resolve_links(store: Store) -> Store:
    """Return the store at the place that symbolic links lead to.

    If two paths lead to the same directory, the paths of their resolved stores are equal.
    """
    return store.at_path(store.path.resolve()) if type(store) is LocalStore else store


def store_below(store: Store, path: str) -> Store:
    """Return the store at a relative path with `/`."""
    for name in path.split("/"):
        store = store.at(name)
    return store


def exists(store: Store) -> bool:
    """Return whether there is a file or directory at a place, or anything below."""
    return store.stat("") is not None or bool(store.list())


def is_file(store: Store) -> bool:
    """Return whether a place is one file. Links are followed."""
    status = store.stat("")
    return status is not None and not status.is_directory


def name_of(store: Store) -> str:
    """Return the last component of the path of a place; "" at the top."""
    place = str(store)
    if scheme_of(place) is None:
        return place.rstrip("/").rpartition("/")[2]
    return parse_url(place, None, needs_host=False).name


def parent_of(store: Store) -> Store | None:
    """Return the store one level above.

    Returns:
        The store; None at the top, and if its path or URL cannot be opened.
    """
    place = str(store)
    if scheme_of(place) is None:
        path = Path(place)
        return LocalStore(path.parent) if path.parent != path else None
    url = parse_url(place, None, needs_host=False)
    if not url.path:
        return None
    try:
        return open_store(str(replace(url, path=url.path.rpartition("/")[0])))
    except StoreError:
        return None


def free_bytes(store: Store) -> int | None:
    """Return the bytes that this user can still write; None if unknown."""
    if not isinstance(store, LocalStore):
        return None
    statistics = os.statvfs(nearest_existing(store.path))
    return statistics.f_bavail * statistics.f_frsize if statistics.f_blocks else None


def abort_uploads(store: Store, idle_seconds: float = 3600.0) -> int:
    """Abort the abandoned uploads below a place, whose parts would cost money.

    Args:
        idle_seconds: how long an upload has got no part; the longest time of a request is added.

    Returns:
        The number of uploads.
    """
    return store.abort_uploads(idle_seconds) if isinstance(store, RepeatingStore) else 0


def lock_for_reading(store: Store, key: str) -> AbstractContextManager[bool]:
    """Keep a checkpoint while a block reads it, given the file that is removed first.

    A store without shared locks keeps the files for its `StoreTraits.reading_grace`.

    Yields:
        False if the checkpoint is being removed, or does not exist.
    """
    if store.traits.lock_expiry:
        return nullcontext(enter_result=True)
    return store.lock(key, shared=True)


def publish_private(store: Store, key: str, data: bytes, public_data: bytes) -> bool:
    """Create or replace a small file atomically and durably, which only its owner can read.

    On a file system, such a file has mode 0600. In other stores, single files have no owner: a user
    who may read the place may read the file.

    Args:
        public_data: the content if the file system does not enforce file modes.

    Returns:
        Whether only the owner can read the file, so that it has `data`.

    Raises:
        OSError: the store cannot be written.
    """
    if not isinstance(store, LocalStore):
        store.publish(key, data, replace=True)
        return True
    store.path.mkdir(parents=True, exist_ok=True)
    with write_atomically(store.path / key, durable=True) as file:
        is_hidden = is_private(os.fstat(file.fileno()))
        file.write(data if is_hidden else public_data)
    return is_hidden


def publish_unsynced(store: Store, key: str, data: bytes) -> None:
    """Create or replace a small file atomically. A crash of the machine may lose or damage it.

    On a file system, it is not synced, so that it does not delay other writes.

    Raises:
        OSError: the store cannot be written.
    """
    if not isinstance(store, LocalStore):
        store.publish(key, data, replace=True)
        return
    store.path.mkdir(parents=True, exist_ok=True)
    with write_atomically(store.path / key, mode=0o666) as file:
        file.write(data)


def read_private(store: Store, key: str, *, limit: int) -> bytes:
    """Return the content of a small file, unless others may have written it.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: the file belongs to another user, or others may read or write it; or it is not
            a regular file, or has more than `limit` bytes.
        OSError: the file cannot be read.
    """
    if not isinstance(store, LocalStore):
        return store.read(key, limit=limit)
    return read_regular(store.path / key, limit, private=True)


def why_no_directory(store: Store) -> str:
    """Return why no directory can be created at a place, such as "/data/run is a file".

    Return "" if a directory can be created.
    """
    if type(store) is not LocalStore:
        return f"{store} is a file" if is_file(store) else ""
    existing = next(each for each in (store.path, *store.path.parents) if os.path.lexists(each))
    if existing.is_dir():
        return ""
    return f"{existing} is {'a file' if existing.exists() else 'a dangling symbolic link'}"
