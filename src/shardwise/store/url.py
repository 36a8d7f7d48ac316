"""Open the store at a path or URL."""

from __future__ import annotations

import os
import re

from shardwise.errors import StoreError
from shardwise.store.local import LocalStore
from shardwise.store.store import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def open_absolute(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store at a place. A relative path is made absolute.

    Raises:
        StoreError: as for `open_store`.
    """
    store = open_store(place)
    return LocalStore(store.path.absolute()) if type(store) is LocalStore else store


def opens_by_name(store: Store) -> bool:
    """Return whether `open_store(str(store))` opens the same store, also in another process."""
    try:
        return type(open_store(str(store))) is type(store)
    except StoreError:
        return False


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store at a directory or `file://` URL. A store is returned unchanged.

    Raises:
        StoreError: the place has another type or is not UTF-8, or the scheme of the URL is unknown.
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
    match = _SCHEME.match(path)
    if match is None:
        return LocalStore(path)
    rest = path[match.end() :]
    if match.group(1) == "file" and rest.startswith("/"):
        return LocalStore(rest)
    raise StoreError(f"{path!r}: unknown scheme {match.group(0)}: use a directory, or file:///path")
