"""Put an object only if there is none, and find out whether the server obeys this condition."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from contextlib import suppress

from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.store.leases import lease_name
from shardwise.store.object_clients import Client
from shardwise.store.object_errors import http_status

PUBLISH_ATTEMPTS = 5
PAUSE_SECONDS = 0.1
AMBIGUOUS_STATUSES = (None, 404, 409, 412, 500, 502, 503, 504)
"""HTTP statuses after which it is unknown whether a put succeeded; None stands for no answer."""


def create_object(
    client: Client, path: str, data: bytes, place: str, sleep: Callable[[float], None]
) -> None:
    """Put an object if there is none.

    After an unclear answer, the object is read. If the object has the same bytes, the put has
    succeeded, because `data` includes a random number that no other writer uses.

    Args:
        client: the client of the bucket.
        path: the key of the object.
        data: its content.
        place: its URL, for messages.
        sleep: the function that waits between attempts.

    Raises:
        FileExistsError: there is another object.
        StoreUnavailableError: the server did not say whether the put succeeded.
    """
    for attempt in range(PUBLISH_ATTEMPTS):
        failure = _try_to_create(client, path, data, place)
        if failure is None:
            return
        found = read_if_exists(client, path, place, limit=len(data))
        if found == data:
            return
        if found is not None:
            raise FileExistsError(errno.EEXIST, "the object exists already", place) from failure
        sleep(PAUSE_SECONDS * 2**attempt)
    raise _unknown_outcome(place, failure) from failure


def read_if_exists(client: Client, path: str, place: str, *, limit: int) -> bytes | None:
    """Return the content of an object.

    Returns:
        The content; None if there is no object; a zero byte if it has more than `limit` bytes.
    """
    import obstore

    try:
        with client.request("read", place):
            result = obstore.get(client.open(), path)
            return bytes(result.bytes()) if result.meta["size"] <= limit else b"\0"
    except FileNotFoundError:
        return None


def probe_conditional_put(
    client: Client, folder: str, place: str, sleep: Callable[[float], None]
) -> None:
    """Refuse a server that ignores the conditions of puts. Each client is probed once.

    The probe creates an object, and tries to create it again. Puts whose outcome is unknown are
    repeated.

    Args:
        client: the client of the bucket.
        folder: the prefix to write a small object to.
        place: the URL of the prefix, for messages.
        sleep: the function that waits between attempts.

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
        create_object(client, path, f"{nonce}-1".encode(), url, sleep)
        client.obeys_conditions = _is_creation_refused(client, path, nonce, url, sleep)
    finally:
        with suppress(OSError), client.request("delete", url):
            obstore.delete(client.open(), path)
    if not client.obeys_conditions:
        raise StoreError(
            f"{place}: this server ignores the condition 'only if the object does not exist', so "
            "that two jobs could overwrite each other's checkpoints without noticing. Use a server "
            "with conditional puts; or, if only one job ever writes below this URL, add "
            "single_writer=true to its options"
        )


def _is_creation_refused(
    client: Client, path: str, nonce: str, url: str, sleep: Callable[[float], None]
) -> bool:
    """Try to create an object that exists. Return whether the server refuses to."""
    for attempt in range(PUBLISH_ATTEMPTS):
        failure = _try_to_create(client, path, f"{nonce}-2".encode(), url)
        if failure is None or isinstance(failure, FileExistsError):
            return failure is not None
        read_if_exists(client, path, url, limit=0)  # fails if the server does not answer at all
        sleep(PAUSE_SECONDS * 2**attempt)
    raise _unknown_outcome(url, failure) from failure


def _try_to_create(client: Client, path: str, data: bytes, place: str) -> OSError | None:
    """Put an object if there is none.

    Returns:
        None if the put succeeded; the error if the put has failed or may have failed.
    """
    import obstore

    try:
        with client.request("write", place):
            obstore.put(client.open(), path, data, mode="create", use_multipart=False)
    except FileExistsError as error:
        return error
    except StoreError as error:
        if http_status(error.__cause__ or error) not in AMBIGUOUS_STATUSES:
            raise
        return error
    return None


def _unknown_outcome(place: str, failure: OSError | None) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{place}: cannot tell whether the object was written: {PUBLISH_ATTEMPTS} puts failed "
        f"({failure}); check the storage, and try again"
    )
