"""Upload an object in parts, and find out what became of it if the last answer is lost."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.errors import StoreUnavailableError
from shardwise.store.object_clients import Client
from shardwise.store.object_errors import translate_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

UPLOAD_ID = "shardwiseupload"
"""The metadata of an object with the random number of its upload. Azure allows no hyphens."""


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
    *,
    part: int,
    requests: int,
) -> None:
    """Upload the chunks that an iterator yields as one object.

    The chunks cannot be uploaded again, because their memory is free by then. But a request that
    begins an upload is repeated, and the requests for the parts are by obstore. If the upload fails
    after the last chunk, it may be that only an answer was lost. Then the object says whether it
    comes from this upload.

    Args:
        client: the client of the bucket.
        path: the key of the object.
        place: its URL, for messages.
        chunks: the content.
        part: the size of a part, in bytes.
        requests: how many parts are uploaded at a time.

    Raises:
        OSError: as for `translate_errors`.
    """
    import obstore

    upload_id = secrets.token_hex(8)
    has_begun = is_complete = False

    def tracked() -> Iterator[memoryview]:
        nonlocal has_begun, is_complete
        has_begun = True
        yield from chunks
        is_complete = True

    def put(store: ObjectStore) -> None:
        try:
            obstore.put(
                store,
                path,
                tracked(),
                chunk_size=part,
                max_concurrency=requests,
                attributes={UPLOAD_ID: upload_id},
            )
        except Exception as error:
            if not has_begun:
                raise
            raise _UploadEndedError(error) from error

    try:
        client.request("write", place, put)
    except _UploadEndedError as ended:
        if is_complete and _find_upload(client, path, place) == upload_id:
            return
        with translate_errors("write", place):
            raise ended.error from None


def _find_upload(client: Client, path: str, place: str) -> str | None:
    """Return the random number of the upload from which an object comes, if there is one."""
    import obstore

    try:
        found = client.request(
            "read", place, lambda store: obstore.get(store, path, options={"head": True})
        )
    except (FileNotFoundError, StoreUnavailableError):
        return None
    return found.attributes.get(UPLOAD_ID)
