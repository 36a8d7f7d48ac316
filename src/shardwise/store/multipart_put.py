"""Upload an object in parts. If the last answer is lost, find out whether the upload succeeded."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from shardwise.errors import StoreUnavailableError
from shardwise.store.object_clients import Client
from shardwise.store.object_errors import translate_errors
from shardwise.store.retry import Retry

if TYPE_CHECKING:
    from obstore.store import ObjectStore

UPLOAD_ID = "shardwiseupload"
"""The key of the metadata that has the random number of an upload. Azure allows no hyphens."""


class _UploadEndedError(Exception):
    """An upload that failed after it has begun, so that it cannot be repeated."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def put_parts(
    client: Client,
    path: str,
    place: str,
    chunks: Iterator[memoryview],
    retry: Retry,
    *,
    part: int,
    requests: int,
) -> None:
    """Upload the chunks that an iterator yields as one object.

    The request that begins the upload is repeated, and obstore repeats the requests for the parts.
    The whole upload is not repeated, because the caller reuses the memory of the chunks. If it
    fails after the last chunk, perhaps only an answer was lost. The metadata of the object then
    says whether the object comes from this upload.

    Args:
        client: the client of the bucket.
        path: the key of the object.
        place: its URL, for messages.
        chunks: the content.
        retry: how long to repeat the request that begins the upload.
        part: the size of a part, in bytes.
        requests: how many parts are uploaded at a time.

    Raises:
        OSError: as for `translate_errors`.
    """
    import obstore

    upload_id = secrets.token_hex(8)
    upload = partial(obstore.put, chunk_size=part, max_concurrency=requests)
    has_begun = is_complete = False

    def tracked() -> Iterator[memoryview]:
        nonlocal has_begun, is_complete
        has_begun = True
        yield from chunks
        is_complete = True

    def put(store: ObjectStore) -> None:
        try:
            upload(store, path, tracked(), attributes={UPLOAD_ID: upload_id})
        except Exception as error:
            if not has_begun:
                raise
            raise _UploadEndedError(error) from error

    try:
        retry.call(lambda: client.request("write", place, put, repeats=True))
    except _UploadEndedError as ended:
        if is_complete and _find_upload(client, path, place, retry) == upload_id:
            return
        with translate_errors("write", place):
            raise ended.error from None


def _find_upload(client: Client, path: str, place: str, retry: Retry) -> str | None:
    """Return the random number of the upload from which an object comes, if there is one."""
    import obstore

    def find() -> str | None:
        found = client.request(
            "read", place, lambda store: obstore.get(store, path, options={"head": True})
        )
        return found.attributes.get(UPLOAD_ID)

    with suppress(FileNotFoundError, StoreUnavailableError):
        return retry.call(find)
    return None
