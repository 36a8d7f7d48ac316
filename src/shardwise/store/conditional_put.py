"""Put an object only if there is none, and find out whether the server obeys this condition."""

from __future__ import annotations

import errno
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.store.leases import lease_name
from shardwise.store.object_clients import Client

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def create_object(client: Client, path: str, data: bytes, place: str) -> None:
    """Put an object if there is none.

    After an unclear answer, the object is read. If the object has the same bytes, the put has
    succeeded, because `data` includes a random number that no other writer uses.

    Args:
        client: the client of the bucket.
        path: the key of the object.
        data: its content.
        place: its URL, for messages.

    Raises:
        FileExistsError: there is another object.
        StoreUnavailableError: the server did not say whether the put succeeded.
    """
    failure: OSError | None = None
    for _ in client.attempts():
        failure = _try_to_create(client, path, data, place)
        if failure is None:
            return
        found = read_if_exists(client, path, place, limit=len(data))
        if found == data:
            return
        if found is not None:
            raise FileExistsError(errno.EEXIST, "the object exists already", place) from failure
        if isinstance(failure, StoreUnavailableError):
            raise failure  # `Client.request` gave up, and there is no object
    raise StoreUnavailableError(
        f"{place}: cannot tell whether the object was written: the server says that it exists, and "
        "does not find it; check the storage, and try again"
    ) from failure


def read_if_exists(client: Client, path: str, place: str, *, limit: int) -> bytes | None:
    """Return the content of an object.

    Returns:
        The content; None if there is no object; a zero byte if it has more than `limit` bytes.
    """
    import obstore

    def get(store: ObjectStore) -> bytes:
        result = obstore.get(store, path)
        return bytes(result.bytes()) if result.meta["size"] <= limit else b"\0"

    try:
        return client.request("read", place, get)
    except FileNotFoundError:
        return None


def probe_conditional_put(client: Client, folder: str, place: str) -> None:
    """Refuse a server that ignores the conditions of puts. Each client is probed once.

    The probe creates an object, and tries to create it again.

    Args:
        client: the client of the bucket.
        folder: the prefix to write a small object to.
        place: the URL of the prefix, for messages.

    Raises:
        StoreError: the server created an object twice.
        PermissionError: this process may not write here.
        StoreUnavailableError: the server did not say whether a put succeeded.
    """
    import obstore

    if client.obeys_conditions:
        return
    # Named like a lease: listings hide it, and it is deleted later if this process dies.
    nonce = secrets.token_hex(8)
    name = lease_name("probe")
    path, url = f"{folder}/{name}" if folder else name, f"{place}/{name}"
    try:
        create_object(client, path, f"{nonce}-1".encode(), url)
        second = _try_to_create(client, path, f"{nonce}-2".encode(), url)
        if isinstance(second, StoreUnavailableError):
            raise second
        client.obeys_conditions = second is not None
    finally:
        with suppress(OSError):
            client.request("delete", url, lambda store: obstore.delete(store, path))
    if not client.obeys_conditions:
        raise StoreError(
            f"{place}: this server ignores the condition 'only if the object does not exist', so "
            "that two jobs could overwrite each other's checkpoints without noticing. Use a server "
            "with conditional puts; or, if only one job ever writes below this URL, add "
            "single_writer=true to its options"
        )


def _try_to_create(
    client: Client, path: str, data: bytes, place: str
) -> FileExistsError | StoreUnavailableError | None:
    """Put an object if there is none.

    Returns:
        None if the put succeeded. The error if the put failed, or if an earlier attempt may have
        succeeded, but its answer was lost.
    """
    import obstore

    def put(store: ObjectStore) -> object:
        return obstore.put(store, path, data, mode="create", use_multipart=False)

    try:
        client.request("write", place, put)
    except (FileExistsError, StoreUnavailableError) as error:
        return error
    return None
