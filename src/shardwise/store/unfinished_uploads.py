"""Abort unfinished multipart uploads in S3, whose parts would cost money for ever."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

log = logging.getLogger("shardwise")


def abort_uploads(client: Any, bucket: str, prefix: str, *, min_age: float) -> int:
    """Abort the unfinished uploads of the objects whose keys begin with a prefix.

    If the credentials do not allow it, the uploads stay, and a message is logged.

    Args:
        client: boto3's client.
        bucket: the name of the bucket.
        prefix: the prefix of the keys.
        min_age: abort only uploads that began at least this many seconds ago, by the clock of the
            server: others may still run.

    Returns:
        The number of aborted uploads.
    """
    import botocore.exceptions

    aborted = 0
    try:
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=prefix
        )
        for page in pages:
            now = _server_time(page)
            for upload in page.get("Uploads", []):
                if now - upload["Initiated"] >= timedelta(seconds=min_age):
                    client.abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    aborted += 1
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        log.info("cannot abort unfinished uploads below s3://%s/%s: %s", bucket, prefix, error)
    return aborted


def _server_time(page: dict[str, Any]) -> datetime:
    """Return the time at which the server answered."""
    return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
