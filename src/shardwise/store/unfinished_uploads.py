"""Abort unfinished multipart uploads in S3, whose parts would cost money for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

log = logging.getLogger("shardwise")


def abort_uploads_of(client: Any, bucket: str, key: str) -> int:
    """Abort the unfinished uploads of an object that no other process writes.

    If the credentials do not allow it, the uploads stay, and a message is logged.

    Args:
        client: boto3's client.
        bucket: the name of the bucket.
        key: the key of the object.

    Returns:
        The number of aborted uploads.
    """
    return _abort(client, bucket, key, lambda upload, _: bool(upload["Key"] == key))


def abort_idle_uploads(client: Any, bucket: str, prefix: str, *, idle_seconds: float) -> int:
    """Abort the unfinished uploads whose writers have probably died.

    An upload is idle if it began at least `idle_seconds` ago and got no part since then. Both times
    are by the clock of the server. If the credentials do not allow it, the uploads stay, and a
    message is logged.

    Args:
        client: boto3's client.
        bucket: the name of the bucket.
        prefix: the prefix of the keys of the objects.
        idle_seconds: longer than a live writer needs for one part, with all its retries.

    Returns:
        The number of aborted uploads.
    """

    def is_idle(upload: dict[str, Any], now: datetime) -> bool:
        idle = timedelta(seconds=idle_seconds)
        return now - upload["Initiated"] >= idle and not any(
            now - part["LastModified"] < idle
            for page in client.get_paginator("list_parts").paginate(
                Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            for part in page.get("Parts", [])
        )

    return _abort(client, bucket, prefix, is_idle)


def _abort(
    client: Any,
    bucket: str,
    prefix: str,
    is_abandoned: Callable[[dict[str, Any], datetime], bool],
) -> int:
    """Abort the uploads below a prefix for which `is_abandoned(upload, now)` returns True."""
    import botocore.exceptions

    aborted = 0
    try:
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=prefix
        )
        for page in pages:
            now = _server_time(page)
            for upload in page.get("Uploads", []):
                try:
                    if is_abandoned(upload, now):
                        client.abort_multipart_upload(
                            Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        aborted += 1
                except client.exceptions.NoSuchUpload:  # noqa: PERF203 - it has just ended
                    continue
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        log.info("cannot abort unfinished uploads below s3://%s/%s: %s", bucket, prefix, error)
    return aborted


def _server_time(page: dict[str, Any]) -> datetime:
    """Return the time at which the server answered."""
    return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
