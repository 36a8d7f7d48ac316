"""Files that only their owner can read, as far as the store can keep others from reading them.

On a file system, such a file has mode 0600. In other stores, single files have no owner: a user
who may read the place may read the file.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress

from shardwise.errors import StoreError
from shardwise.store.local import LocalStore
from shardwise.store.local_files import open_regular
from shardwise.store.store import Store


def publish_private(store: Store, key: str, data: bytes) -> bool:
    """Create or replace a small file atomically and durably, which only its owner can read.

    Returns:
        Whether the file was written. False if the file system does not enforce file modes.

    Raises:
        OSError: the store cannot be written.
    """
    if not isinstance(store, LocalStore):
        store.publish(key, data, replace=True)
        return True
    store.path.mkdir(parents=True, exist_ok=True)
    temporary = store.path / f".{key}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            if not is_private(os.fstat(file.fileno())):
                return False
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, store.path / key)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


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
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if not is_private(os.fstat(fd)):
            raise StoreError(
                f"{path} belongs to another user, or others may read or write it, so it is not "
                "trusted; if it is yours: chmod 600"
            )
        data = file.read(limit + 1)
    if len(data) > limit:
        raise StoreError(
            f"{path} has more than the expected {limit} bytes: it is damaged; delete it"
        )
    return data


def is_private(status: os.stat_result) -> bool:
    """Return whether a regular file belongs to this user, and no other user may access it."""
    is_own = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077


def has_owners(store: Store) -> bool:
    """Return whether a file of the store has an owner, so that `read_private` checks it."""
    return isinstance(store, LocalStore)
