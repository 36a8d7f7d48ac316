"""Stores: places for the files of checkpoints, accessed by name."""

from shardwise.store.local import LocalStore, local_path
from shardwise.store.store import (
    BoundedStore,
    Files,
    FileStatus,
    MappedFile,
    MappedStore,
    ReadableFile,
    ReplicatedFile,
    Store,
    WritableFile,
)
from shardwise.store.url import open_absolute, open_store, opens_by_name

__all__ = [
    "BoundedStore",
    "FileStatus",
    "Files",
    "LocalStore",
    "MappedFile",
    "MappedStore",
    "ReadableFile",
    "ReplicatedFile",
    "Store",
    "WritableFile",
    "local_path",
    "open_absolute",
    "open_store",
    "opens_by_name",
]
