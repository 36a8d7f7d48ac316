"""Places as users write them."""

from __future__ import annotations

import os
import re

from shardwise.errors import StoreError
from shardwise.store.local import LocalStore
from shardwise.store.store import Store

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")


def open_store(place: str | os.PathLike[str] | Store) -> Store:
    """The store at a place: a directory, a `file://` URL, or a store as it is.

    Raises:
        StoreError: no store serves this kind of URL.
    """
    if not isinstance(place, (str, os.PathLike)):
        return place
    path = os.fspath(place)
    match = _SCHEME.match(path)
    if match is None:
        return LocalStore(path)
    if match.group(1) == "file":
        return LocalStore(path[len("file://") :])
    raise StoreError(f"no store serves {match.group(0)} (in {path!r}): use a directory or file://")
