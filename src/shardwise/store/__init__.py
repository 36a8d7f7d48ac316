"""Stores: places for the files of checkpoints, accessed by name."""

from shardwise.store.local import LocalStore, local_path
from shardwise.store.read_only import ReadOnlyStore
from shardwise.store.store import (
    BoundedStore,
    Files,
    FileStatus,
    MappedFile,
    MappedStore,
    ReadableFile,
    ReplicatedFile,
    Store,
    StoreTraits,
    TransferOptions,
    UploadingStore,
    WritableFile,
)
from shardwise.store.url import (
    find_obstacle,
    open_absolute,
    open_store,
    opens_by_name,
    resolve_links,
    store_below,
)

__all__ = [
    "BoundedStore",
    "FileStatus",
    "Files",
    "LocalStore",
    "MappedFile",
    "MappedStore",
    "ReadOnlyStore",
    "ReadableFile",
    "ReplicatedFile",
    "Store",
    "StoreTraits",
    "TransferOptions",
    "UploadingStore",
    "WritableFile",
    "find_obstacle",
    "local_path",
    "open_absolute",
    "open_store",
    "opens_by_name",
    "resolve_links",
    "store_below",
]
