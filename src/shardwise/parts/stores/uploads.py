"""Write an object: in one put if it is small, otherwise as a multipart upload in the background.

The parts of an unfinished upload, which nobody sees, cost money until they are deleted.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.stores.object_clients import Client
from shardwise.parts.stores.object_errors import translate_errors
from shardwise.parts.stores.retry import Retry

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger("shardwise")
WAIT_SECONDS = 1.0
ABORT_SECONDS = 60.0
UPLOAD_ID = "shardwiseupload"
"""The key of the metadata that has the random number of an upload. Azure allows no hyphens."""


class SmallUpload:
    """An object that is collected in memory and written at once. It is visible after `commit`.

    Args:
        size: the size of the object, in bytes.
        put: uploads the content.
    """

    def __init__(self, size: int, put: Callable[[memoryview], object]) -> None:
        self._content = np.zeros(size, np.uint8)
        self._put = put

    def write_at(self, offset: int, data: Buffer) -> None:
        part = self._content[offset : offset + len(data)]
        part[:] = data[: len(part)]

    def commit(self) -> None:
        self._put(self._content.data)

    def close(self) -> None:
        self._content = np.zeros(0, np.uint8)


class UploadStream:
    """Uploads the bytes of an object in a thread, while a `SequentialWriter` writes them in order.

    The request that begins the upload is repeated, and obstore repeats the requests for the parts.
    The whole upload is not repeated, because the memory of a part is freed once it is uploaded. If
    the upload fails after the last part, perhaps only an answer was lost. The metadata of the
    object then says whether the object comes from this upload.

    Args:
        client: the client of the bucket.
        key: the key of the object, which no other process writes.
        retry: how long to repeat the request that begins the upload.
        part: the size of a part, in bytes.
        requests: how many parts are uploaded at a time.
    """

    def __init__(self, client: Client, key: str, retry: Retry, *, part: int, requests: int) -> None:
        self._client, self._key, self._retry = client, key, retry
        self._options: dict[str, Any] = {"chunk_size": part, "max_concurrency": requests}
        self._upload_id = secrets.token_hex(8)
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(maxsize=2)
        self._has_begun = self._is_complete = self._is_discarded = False
        self._failure: Exception | None = None  # of an upload that has begun
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._upload, name="shardwise-upload", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Upload a chunk, whose memory nobody else changes."""
        self._pass_on(data)

    def close(self) -> None:
        """Complete the object."""
        self._pass_on(None)
        self._thread.join()
        self._check()

    def discard(self) -> None:
        """Abort the upload, unless it has ended."""
        self._is_discarded = True
        with suppress(queue.Empty):
            while True:
                self._chunks.get_nowait()
        with suppress(queue.Full):
            self._chunks.put_nowait(None)
        self._thread.join(ABORT_SECONDS)

    def _pass_on(self, chunk: memoryview | None) -> None:
        while True:
            self._check()
            with suppress(queue.Full):
                self._chunks.put(chunk, timeout=WAIT_SECONDS)
                return

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _upload(self) -> None:
        try:
            with translate_errors("write", self._client.place(self._key)):
                abort_uploads(
                    self._client, self._key, key=self._key
                )  # those of a process that was killed
                self._retry.call(
                    lambda: self._client.request("write", self._key, self._put, repeats=True)
                )
                if self._failure is not None and not self._has_succeeded():
                    raise self._failure
        except BaseException as error:
            self._error = error
            with suppress(Exception):  # the error of the upload itself says more
                abort_failed_upload(self._client, self._key)

    def _put(self, store: ObjectStore) -> None:
        try:
            attributes = {UPLOAD_ID: self._upload_id}
            store.put(self._key, self._parts(), attributes=attributes, **self._options)
        except Exception as error:
            if not self._has_begun:
                raise
            self._failure = error

    def _parts(self) -> Iterator[memoryview]:
        """Yield the chunks. The memory of a chunk is freed once the chunk is uploaded."""
        self._has_begun = True
        while (chunk := self._chunks.get()) is not None and not self._is_discarded:
            yield chunk
        if self._is_discarded:
            raise StoreError(
                f"{self._client.place(self._key)}: the upload was stopped, because the file was "
                "closed before it was complete"
            )
        self._is_complete = True

    def _has_succeeded(self) -> bool:
        """Return whether the object comes from this upload, although an answer was lost."""
        if not self._is_complete:
            return False
        with suppress(FileNotFoundError, StoreUnavailableError):
            found = self._retry.call(
                lambda: self._client.request(
                    "read", self._key, lambda store: store.get(self._key, options={"head": True})
                )
            )
            return found.attributes.get(UPLOAD_ID) == self._upload_id
        return False


def abort_failed_upload(client: Client, key: str) -> None:
    """Delete the parts of an upload of this process that has failed.

    Args:
        client: the client of the bucket.
        key: the key of the object, which no other process writes.

    Raises:
        Exception: the server does not answer, or denies it.
    """
    if client.url.scheme == "az":
        try:
            client.open().head(key)  # the upload would have replaced this object
        except FileNotFoundError:
            # Azure keeps the blocks of a blob for a week, unless somebody writes the blob.
            client.open().put(key, b"", use_multipart=False)
            client.open().delete(key)
    else:
        abort_uploads(client, key, key=key)


def abort_uploads(
    client: Client, prefix: str, *, key: str | None = None, idle_seconds: float = 0.0
) -> int:
    """Abort unfinished uploads that nobody continues. For S3 with boto3 only.

    If the credentials do not allow it, the uploads stay, and a message is logged.

    Args:
        client: the client of the bucket.
        prefix: the prefix of the keys of the objects.
        key: the only object whose uploads are aborted; None for all with the prefix.
        idle_seconds: an upload is aborted if it began this long ago, and got no part since then, by
            the clock of the server. Without `key`, longer than a live writer needs for one part,
            with all its retries.

    Returns:
        The number of aborted uploads.
    """
    s3, bucket = client.boto3_client, client.url.host
    if s3 is None:
        return 0
    import botocore.exceptions

    aborted = 0
    try:
        pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            answered_at = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            since = answered_at - timedelta(seconds=idle_seconds)
            for found in page.get("Uploads", []):
                if key not in (None, found["Key"]):
                    continue
                upload = {"Bucket": bucket, "Key": found["Key"], "UploadId": found["UploadId"]}
                with suppress(s3.exceptions.NoSuchUpload):  # it has just ended
                    if not idle_seconds or _is_idle(s3, upload, found["Initiated"], since):
                        s3.abort_multipart_upload(**upload)
                        aborted += 1
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        log.info("cannot abort unfinished uploads below s3://%s/%s: %s", bucket, prefix, error)
    return aborted


def _is_idle(s3: Any, upload: dict[str, str], began_at: datetime, since: datetime) -> bool:
    """Return whether an upload began before a time, and got no part since then."""
    return began_at <= since and not any(
        part["LastModified"] > since
        for page in s3.get_paginator("list_parts").paginate(**upload)
        for part in page.get("Parts", [])
    )
