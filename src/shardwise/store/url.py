"""Places as users write them."""

from __future__ import annotations

import os
import re

from shardwise.errors import StoreError
from shardwise.store.local import LocalStore
from shardwise.store.store import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """The store at a place: a directory, a `file://` URL, or a store as it is.

    Raises:
        StoreError: it is none of these, it is not UTF-8, or no store serves this kind of URL.
    """
    if isinstance(place, Store):
        return place
    path = os.fspath(place) if isinstance(place, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise StoreError(f"{place!r} is no place: a path, a URL or a store is needed")
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
    raise StoreError(
        f"no store serves {match.group(0)} (in {path!r}): use a directory, or file:///path"
    )
