"""Upload an object in parts. If the last answer is lost, find out whether the upload succeeded."""

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
