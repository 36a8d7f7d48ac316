"""Stores: places for the files of checkpoints, accessed by name."""

from shardwise.store.local import LocalStore, local_path
from shardwise.store.read_only import ReadOnlyStore
from shardwise.store.store import (
    BoundedStore,
    Files,
    FileStatus,
    MappedStore,
    ReadableFile,
    ReplicatedFile,
    Store,
    StoreTraits,
    TransferOptions,
    UploadingStore,
    ViewableFile,
    WritableFile,
)
from shardwise.store.url import (
    can_be_reopened,
    open_absolute,
    open_store,
    resolve_links,
    store_below,
    why_no_directory,
)

__all__ = [
    "BoundedStore",
    "FileStatus",
    "Files",
    "LocalStore",
    "MappedStore",
    "ReadOnlyStore",
    "ReadableFile",
    "ReplicatedFile",
    "Store",
    "StoreTraits",
    "TransferOptions",
    "UploadingStore",
    "ViewableFile",
    "WritableFile",
    "can_be_reopened",
    "local_path",
    "open_absolute",
    "open_store",
    "resolve_links",
    "store_below",
    "why_no_directory",
]
