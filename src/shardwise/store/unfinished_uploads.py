"""Delete the parts of unfinished uploads, which nobody sees, but which cost money."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from shardwise.store.object_clients import Client

log = logging.getLogger("shardwise")


def abort_failed_upload(client: Client, key: str) -> None:
    """Delete the parts of an upload of this process that has failed.

    Args:
        client: the client of the bucket.
        key: the key of the object, which no other process writes.

    Raises:
        Exception: the server does not answer, or denies it.
    """
    if client.url.scheme == "az":
        import obstore

        try:
            obstore.head(client.open(), key)  # the upload would have replaced this object
        except FileNotFoundError:
            # Azure keeps the blocks of a blob for a week, unless somebody writes the blob.
            obstore.put(client.open(), key, b"", use_multipart=False)
            obstore.delete(client.open(), key)
    else:
        abort_uploads_of(client, key)


def abort_uploads_of(client: Client, key: str) -> int:
    """Abort the unfinished uploads of an object that no other process writes. For S3 only.

    If the credentials do not allow it, the uploads stay, and a message is logged.

    Args:
        client: the client of the bucket.
        key: the key of the object.

    Returns:
        The number of aborted uploads.
    """
    return _abort(client, key, lambda upload, _: bool(upload["Key"] == key))


def abort_idle_uploads(client: Client, prefix: str, *, idle_seconds: float) -> int:
    """Abort the unfinished uploads whose writers have probably died. For S3 with boto3 only.

    An upload is idle if it began at least `idle_seconds` ago and got no part since then. Both times
    are by the clock of the server. If the credentials do not allow it, the uploads stay, and a
    message is logged.

    Args:
        client: the client of the bucket.
        prefix: the prefix of the keys of the objects.
        idle_seconds: longer than a live writer needs for one part, with all its retries.

    Returns:
        The number of aborted uploads.
    """
    s3, bucket = client.boto3_client(), client.url.host

    def is_idle(upload: dict[str, Any], now: datetime) -> bool:
        idle = timedelta(seconds=idle_seconds)
        return now - upload["Initiated"] >= idle and not any(
            now - part["LastModified"] < idle
            for page in s3.get_paginator("list_parts").paginate(
                Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            for part in page.get("Parts", [])
        )

    return _abort(client, prefix, is_idle)


def _abort(
    client: Client, prefix: str, is_abandoned: Callable[[dict[str, Any], datetime], bool]
) -> int:
    """Abort the uploads below a prefix for which `is_abandoned(upload, now)` returns True."""
    s3, bucket = client.boto3_client(), client.url.host
    if s3 is None:
        return 0
    import botocore.exceptions

    aborted = 0
    try:
        pages = s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            now = _server_time(page)
            for upload in page.get("Uploads", []):
                try:
                    if is_abandoned(upload, now):
                        s3.abort_multipart_upload(
                            Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        aborted += 1
                except s3.exceptions.NoSuchUpload:  # noqa: PERF203 - it has just ended
                    continue
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        log.info("cannot abort unfinished uploads below s3://%s/%s: %s", bucket, prefix, error)
    return aborted


def _server_time(page: dict[str, Any]) -> datetime:
    """Return the time at which the server answered."""
    return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
