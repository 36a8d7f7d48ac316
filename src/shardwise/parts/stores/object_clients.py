"""Open obstore's client of a bucket: endpoint, region, credentials, time-outs and retries."""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.names import StoreUrl
from shardwise.parts.stores.object_errors import translate_errors

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

OPTIONS = {
    "s3": ("endpoint", "region", "profile", "virtual_hosted"),
    "gs": ("endpoint",),
    "az": ("endpoint", "account"),
    "http": (),
    "https": (),
}
"""The options that each scheme has, besides `COMMON_OPTIONS`."""
COMMON_OPTIONS = (
    "allow_http",
    "anonymous",
    "grace_seconds",
    "lock_seconds",
    "part_mib",
    "requests",
    "single_writer",
    "timeout",
)
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "http": "http", "https": "http"}
REQUEST_SECONDS = 120.0
SHORT_RETRY_SECONDS = 3.0
MOST_RETRIES = 1000  # never reached: the time is the limit
CONNECT_SECONDS = 10.0
CREDENTIALS_LIFETIME = timedelta(minutes=10)
DEFAULT_REGION = "us-east-1"

T = TypeVar("T")
log = logging.getLogger("shardwise")


class Client:
    """The client of one bucket.

    Only the process that opens the client can use it, because a fork does not copy its threads.

    Args:
        url: the URL of the bucket; its path is ignored.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._opened: dict[bool, ObjectStore] = {}  # by `repeats`
        self.obeys_conditions = False  # whether a probe has shown that the server obeys them

    def open(self, *, repeats: bool = False) -> ObjectStore:
        """Return obstore's client, opened in this process.

        Args:
            repeats: the client repeats a failed request for as long as the URL says. Otherwise, it
                does so for a moment only, because `RetryingStore` repeats the operation.

        Raises:
            StoreError: obstore is not installed, the options are wrong, no credentials were found,
                or this process was forked from one that has used obstore.
        """
        if _first_process() != os.getpid():
            raise StoreError(
                f"{self.url}: process {os.getpid()} was forked from process {_first_process()}, "
                "which had used an object store before: its connections do not work here, and no "
                "new ones can be opened; start processes with the method 'spawn', or fork before "
                "the first use of the store"
            )
        with self._lock:
            if repeats not in self._opened:
                seconds = self.url.retry_seconds
                limit = seconds if repeats else min(seconds, SHORT_RETRY_SECONDS)
                self._opened[repeats] = _open_client(self.url, _retry_config(limit))
            return self._opened[repeats]

    def request(
        self, action: str, key: str, send: Callable[[ObjectStore], T], *, repeats: bool = False
    ) -> T:
        """Send a request.

        Args:
            action: as for `translate_errors`.
            key: the key of the object, or a prefix.
            send: sends the request.
            repeats: as for `open`.

        Raises:
            OSError: as for `translate_errors`.
        """
        # The first request is usually a list. So its errors also show the options of the URL, such
        # as the endpoint.
        place = str(replace(self.url, path=key)) if action == "list" else self.place(key)
        with translate_errors(action, place):
            return send(self.open(repeats=repeats))

    def place(self, key: str) -> str:
        """Return the URL of an object without options, for messages."""
        return f"{self.url.scheme}://{self.url.host}/{key}"

    @cached_property
    def boto3_client(self) -> Any:
        """boto3's client of the same bucket; None if the scheme is not s3, or without boto3.

        Raises:
            StoreError: the profile does not exist.
        """
        return _boto3_client(self.url) if self.url.scheme == "s3" else None


@cache
def _first_process() -> int:
    """Return the id of the process that first used obstore, whose threads a fork does not copy."""
    return os.getpid()


def find_settings(url: StoreUrl) -> dict[str, str]:
    """Return what the environment of this process adds to a URL, as options of the URL.

    Another process with the same URL but another environment would use another server or account.
    Credentials are not returned.

    Raises:
        StoreError: the profile does not exist.
    """
    if url.scheme == "az":
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        return {"account": account} if account and "account" not in url.options else {}
    session = _boto3_session(url) if url.scheme == "s3" else None
    if session is None:
        return {}
    found = {}
    endpoint = _boto3_client(url).meta.endpoint_url
    if "endpoint" not in url.options and not _is_aws(endpoint):
        found["endpoint"] = endpoint
    if "profile" not in url.options and session.profile_name != "default":
        found["profile"] = session.profile_name
    return found


def _is_aws(endpoint: str) -> bool:
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _open_client(url: StoreUrl, retry: RetryConfig) -> ObjectStore:
    try:
        import obstore.store
    except ImportError as error:
        raise StoreError(
            f"{url}: {url.scheme}:// needs the package obstore: "
            f"pip install 'shardwise[{EXTRAS[url.scheme]}]'"
        ) from error
    if url.scheme == "s3":
        return _open_s3(url, retry)
    if url.scheme.startswith("http"):
        server = f"{url.scheme}://{url.host}"
        return obstore.store.HTTPStore(
            server, client_options=_client_options(url, server), retry_config=retry
        )
    endpoint = url.options.get("endpoint")
    kind: Any = obstore.store.GCSStore if url.scheme == "gs" else obstore.store.AzureStore
    given = {"base_url" if url.scheme == "gs" else "endpoint": endpoint} if endpoint else {}
    if "account" in url.options:  # of Azure
        given["account_name"] = url.options["account"]
    store: ObjectStore = kind(
        url.host,
        client_options=_client_options(url, endpoint),
        retry_config=retry,
        skip_signature=url.is_set("anonymous"),
        **given,
    )
    return store


def _open_s3(url: StoreUrl, retry: RetryConfig) -> ObjectStore:
    """Open a bucket as AWS's own tools do: boto3 finds the credentials, region and endpoint.

    Without boto3, obstore finds them itself, except for profiles.
    """
    from obstore.store import S3Store

    endpoint, region = url.options.get("endpoint"), url.options.get("region")
    config: dict[str, Any] = {"skip_signature": url.is_set("anonymous")}
    session = _boto3_session(url)
    if session is not None:
        if endpoint:  # boto3's client is not needed; to make one takes a tenth of a second
            region = region or session.region_name
        else:
            found = _boto3_client(url).meta
            endpoint = None if _is_aws(found.endpoint_url) else found.endpoint_url
            region = region or found.region_name
        if not url.is_set("anonymous"):
            config["credential_provider"] = _credentials(url, session)
    config["region"] = region if region and region != "aws-global" else DEFAULT_REGION
    if endpoint:
        config["endpoint"] = endpoint
        config["virtual_hosted_style_request"] = url.is_set("virtual_hosted")
    # Over TLS, a checksum of each body for its signature would only cost time.
    config["unsigned_payload"] = not (endpoint or "https:").startswith("http:")
    return S3Store(
        url.host,
        client_options=_client_options(url, endpoint),
        retry_config=retry,
        **config,
    )


def _credentials(url: StoreUrl, session: Any) -> Any:
    """Return the credentials that boto3 finds, which obstore asks for again before they expire."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        found = Boto3CredentialProvider(session, ttl=CREDENTIALS_LIFETIME)
    except ValueError as error:
        raise StoreError(
            f"{url}: no credentials for S3 were found: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, name a profile of ~/.aws in the URL (?profile=NAME), run on an "
            "instance with a role, or read a public bucket with ?anonymous=true"
        ) from error
    found.config = {}  # it has the region of the session, but the URL may name another region
    return found


def _boto3_session(url: StoreUrl) -> Any:
    """Return a boto3 session; None without boto3."""
    profile = url.options.get("profile")
    try:
        import boto3
        import botocore.exceptions
    except ImportError as error:
        if profile is None:
            return None
        raise StoreError(
            f"{url}: profiles need the package boto3: pip install 'shardwise[s3]'"
        ) from error
    try:
        return boto3.Session(profile_name=profile)
    except botocore.exceptions.BotoCoreError as error:
        raise StoreError(f"{url}: {error}; check ~/.aws/config and the option profile") from error


def _boto3_client(url: StoreUrl) -> Any:
    """Return boto3's S3 client; None without boto3."""
    session = _boto3_session(url)
    if session is None:
        return None
    import botocore.config
    import botocore.exceptions

    config = botocore.config.Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=CONNECT_SECONDS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    if url.is_set("anonymous"):
        config = config.merge(botocore.config.Config(signature_version=botocore.UNSIGNED))
    try:
        return session.client(
            "s3",
            endpoint_url=url.options.get("endpoint"),
            region_name=url.options.get("region"),
            config=config,
        )
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreError(
            f"{url}: {error}; check the endpoint, the region and ~/.aws/config"
        ) from error


def _client_options(url: StoreUrl, endpoint: str | None) -> ClientConfig:
    """Return time-outs, and whether plain http is allowed.

    Raises:
        StoreError: the endpoint is plain http on another machine, and `allow_http` is not set.
    """
    is_plain = endpoint is not None and endpoint.lower().startswith("http:")
    if is_plain and not url.is_set("allow_http") and not _is_loopback(endpoint or ""):
        raise StoreError(
            f"{url}: {endpoint} is not encrypted: use https, or add allow_http=true to the options "
            "if you trust the network"
        )
    return {
        # Without `endpoint`, obstore may find the endpoint elsewhere, such as in the environment.
        "allow_http": is_plain or url.is_set("allow_http"),
        "timeout": timedelta(seconds=_request_seconds(url)),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
    }


def _is_loopback(endpoint: str) -> bool:
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def longest_request(url: StoreUrl) -> float:
    """Return how long a request of obstore can take with all its retries, in seconds."""
    return url.retry_seconds + _request_seconds(url)


def _request_seconds(url: StoreUrl) -> float:
    return url.number("timeout", REQUEST_SECONDS, smallest=0.1)


def _retry_config(seconds: float) -> RetryConfig:
    return {
        "max_retries": MOST_RETRIES if seconds else 0,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=15),
            "base": 3,  # a pause is random, and on average 1.5 times as long as the one before
        },
    }
