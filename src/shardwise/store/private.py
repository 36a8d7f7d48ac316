"""Files that only their owner can read, as far as the store can keep others from reading them.

On a file system, such a file has mode 0600. In other stores, single files have no owner: a user
who may read the place may read the file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.store.local import LocalStore
from shardwise.store.local_files import read_regular, write_atomically
from shardwise.store.store import Store


def publish_private(store: Store, key: str, data: bytes, public_data: bytes) -> bool:
    """Create or replace a small file atomically and durably, which only its owner can read.

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
    path = store.path / key
    return read_regular(path, limit, check=_refuse_shared)


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    if not is_private(status):
        raise StoreError(
            f"{path} belongs to another user, or others may read or write it, so it is not "
            "trusted; if it is yours: chmod 600; otherwise remove it, or choose another directory"
        )


def is_private(status: os.stat_result) -> bool:
    """Return whether a regular file belongs to this user, and no other user may access it."""
    is_own = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077
