"""The port of stores: all names that a store for another kind of storage imports.

A store is a class with the ten methods of `Store`. An entry point of the group `shardwise.stores`
names a function that opens the store at a URL; see docs/ports/store.md.
"""

from __future__ import annotations

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.store import (
    FileStatus,
    ReadableFile,
    Store,
    StoreTraits,
    ViewableFile,
    WritableFile,
    exists,
    is_file,
    open_store,
)
from shardwise.kernel.store.names import (
    StoreUrl,
    check_name,
    check_name_to_write,
    check_path,
    parse_url,
)
from shardwise.kernel.store.store import Buffer
from shardwise.ports.lease_locks import LeaseDirectory, is_lease
from shardwise.ports.sequential import SequentialWriter, Stream

__all__ = [
    "Buffer",
    "FileStatus",
    "LeaseDirectory",
    "ReadableFile",
    "SequentialWriter",
    "Store",
    "StoreError",
    "StoreTraits",
    "StoreUnavailableError",
    "StoreUrl",
    "Stream",
    "ViewableFile",
    "WritableFile",
    "check_name",
    "check_name_to_write",
    "check_path",
    "exists",
    "is_file",
    "is_lease",
    "open_store",
    "parse_url",
]
