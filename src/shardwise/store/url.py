"""Open the store at a path or URL."""

from __future__ import annotations

import os

from shardwise.errors import StoreError
from shardwise.store.local import LocalStore
from shardwise.store.store import Store
from shardwise.store.store_url import parse_url, scheme_of

OBJECT_SCHEMES = ("s3", "gs", "az", "http", "https")
_OTHER_SCHEMES = (
    *("file", "hdfs", "webhdfs", "s3a", "s3n", "gcs", "abfs", "abfss", "adl", "wasb", "wasbs"),
    *("memory", "sftp", "ssh", "ftp", "smb", "oci", "oss", "dbfs", "hf", "r2"),
)


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
    if scheme_of(str(store)) not in OBJECT_SCHEMES:
        return store
    from shardwise.store.object_store import ObjectStore

    return store.with_settings() if isinstance(store, ObjectStore) else store


def can_be_reopened(store: Store) -> bool:
    """Return whether `open_store(str(store))` opens the same store, also in another process."""
    try:
        return type(open_store(str(store))) is type(store)
    except StoreError:
        return False


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
    _refuse_shortened_url(path)
    scheme = scheme_of(path)
    if scheme is None:
        return LocalStore(path)
    if scheme == "file":
        return _open_file_url(path)
    if scheme in OBJECT_SCHEMES:
        from shardwise.store.object_store import ObjectStore

        return ObjectStore(path)
    if scheme == "hdfs":
        from shardwise.store.hdfs import open_hdfs

        return open_hdfs(path)
    from shardwise.store.fsspec_store import open_fsspec

    return open_fsspec(path)


def _refuse_shortened_url(path: str) -> None:
    """Refuse `s3:/bucket/run`, which `pathlib.Path("s3://bucket/run")` becomes.

    Raises:
        StoreError: a known scheme and a colon begin the path, without `//`.
    """
    scheme, colon, rest = path.partition(":")
    if not colon or rest.startswith("//"):
        return
    if scheme.lower() in (*OBJECT_SCHEMES, *_OTHER_SCHEMES):
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


def why_no_directory(store: Store) -> str:
    """Return why no directory can be created at a place, such as "/data/run is a file".

    Return "" if a directory can be created.
    """
    if type(store) is not LocalStore:
        return f"{store} is a file" if store.is_file() else ""
    existing = next(each for each in (store.path, *store.path.parents) if os.path.lexists(each))
    if existing.is_dir():
        return ""
    return f"{existing} is {'a file' if existing.exists() else 'a dangling symbolic link'}"
