"""Translate the errors of obstore: what failed, where, why, and what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.kernel.errors import StoreError, StoreUnavailableError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"(?:<Code>|\(code: )(\w+)")  # the second is for one key of a bulk delete
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "ExpiredTokenException")
_BUCKETS = {"NoSuchBucket": "bucket", "ContainerNotFound": "container"}
"""The noun for messages, by the error code of the server."""
_DENIED = (401, 403)
NOT_FOUND = 404
_UNAVAILABLE = (408, 429, 500, 502, 503, 504)
_LONGEST_REASON = 300


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of obstore; None if the server did not answer."""
    match = _STATUS.search(str(error))
    return int(match.group(1)) if match else None


@contextmanager
def translate_errors(action: str, place: str) -> Iterator[None]:
    """Translate the errors of obstore in the block.

    Args:
        action: what is done, such as `read`, for the message.
        place: the URL of the object.

    Raises:
        FileNotFoundError: the object to read or delete does not exist.
        FileExistsError: the object exists, or a condition of the request does not hold.
        PermissionError: the credentials are missing or expired, or do not allow the request.
        StoreUnavailableError: the server does not answer, or says that it is overloaded.
        StoreError: anything else.
    """
    try:
        yield
    except (StoreError, FileExistsError, PermissionError):
        raise
    except FileNotFoundError as error:
        if any(code in str(error) for code in _BUCKETS):
            raise _store_error(action, place, error) from error
        if "NoSuchUpload" in str(error):
            raise StoreUnavailableError(
                f"{place}: cannot {action}: the upload ended on the server before it was complete, "
                "because an answer was lost, a rule of the bucket removed it, or somebody aborted "
                "it; save again"
            ) from error
        if action == "write" or (action == "delete" and place.startswith("s3:")):
            # Neither request needs an object: S3 deletes an absent one with success.
            raise _store_error(action, place, error) from error
        raise FileNotFoundError(errno.ENOENT, "no such object", place) from error
    except Exception as error:
        if not type(error).__module__.startswith("obstore") and not isinstance(error, OSError):
            raise
        raise _translate(action, place, error) from error


def _translate(action: str, place: str, error: Exception) -> OSError:
    name = type(error).__name__
    if name in ("AlreadyExistsError", "PreconditionError"):
        return FileExistsError(
            errno.EEXIST,
            "an object of this name exists already: save again, or remove the object",
            place,
        )
    code = _CODE.search(str(error))
    if code is not None and code[1] in _EXPIRED:
        return PermissionError(
            errno.EACCES, f"cannot {action}: the credentials have expired; renew them", place
        )
    is_denied = http_status(error) in _DENIED or (code is not None and code[1] == "AccessDenied")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or is_denied:
        return PermissionError(
            errno.EACCES,
            f"cannot {action}: the server denies access ({code[1] if code else name}); check the "
            "credentials, and that they allow to list, read, write and delete below this URL",
            place,
        )
    return _store_error(action, place, error)


def _store_error(action: str, place: str, error: Exception) -> StoreError:
    text, status = str(error), http_status(error)
    error_class = StoreError
    missing = next((what for code, what in _BUCKETS.items() if code in text), None)
    if missing is not None:
        advice = f"the {missing} does not exist: create it, or correct the URL"
    elif "must be specified" in text:
        advice = (
            "a setting is missing; for az://, set AZURE_STORAGE_ACCOUNT_NAME, or add account=NAME "
            "to the options of the URL"
        )
    elif "builder error" in text and " http://" in text:
        advice = (
            "the endpoint is not encrypted: use https, or add allow_http=true to the options of "
            "the URL if you trust the network"
        )
    elif "PermanentRedirect" in text or "AuthorizationHeaderMalformed" in text:
        advice = "the bucket is in another region: add region=NAME to the options of the URL"
    elif status == 501:
        advice = (
            "the server does not know this request; if it is a conditional put and only one "
            "process writes, add single_writer=true to the options of the URL"
        )
    elif status is None or status in _UNAVAILABLE:
        error_class = StoreUnavailableError
        advice = "the server does not answer now: check the endpoint and the network"
    elif status == NOT_FOUND and action in ("write", "delete"):
        error_class = StoreUnavailableError
        advice = (
            "the server says that it does not find what this request is for, although the request "
            "needs only the bucket: check the endpoint, and proxies on the way to it"
        )
    else:
        advice = "the server refused the request, also when it was repeated"
    translated = error_class(f"{place}: cannot {action}: {advice} ({_reason(text)})")
    if status == NOT_FOUND:
        translated.errno = errno.ENOENT  # `RetryingStore` may wait for what was just written
    return translated


def _reason(text: str) -> str:
    """Return the message of an error of obstore, without the nested debug output after it."""
    message = " ".join(text.partition("Debug source:")[0].split())
    return message if len(message) <= _LONGEST_REASON else f"{message[:_LONGEST_REASON]}…"
