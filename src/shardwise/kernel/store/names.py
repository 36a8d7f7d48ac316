"""Check the names of files in stores, and parse the URLs of stores and their options."""

from __future__ import annotations

import os
import re
import secrets
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardwise.kernel.errors import StoreError

LONGEST_NAME = 255
TEMPORARY_SUFFIX = ".part"
RETRY_SECONDS = 180.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"secret|passw|token|credential|signature|(^|_)(key|sas|sig)", re.IGNORECASE)
_ESCAPED = {"%": "%25", "?": "%3F"}


def check_name(name: str, place: object) -> None:
    """Check the name of a file to read. Other programs use names such as `epoch=0-step=10.ckpt`.

    Args:
        place: the store of the file, for messages.

    Raises:
        StoreError: the name is not one component of a path, or is too long.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise StoreError(
            f"{name!r} is not a valid name of a file below {place}: expected one component of a "
            "path"
        )
    if len(os.fsencode(name)) > LONGEST_NAME:
        raise StoreError(
            f"{name[:60]!r}... below {place}: the name is longer than {LONGEST_NAME} bytes, so no "
            "such file can exist"
        )


def check_path(path: str, place: object) -> None:
    """Check a relative path of a file to read, with `/`. "" is the place itself.

    Raises:
        StoreError: a component of the path is no valid name.
    """
    for name in path.split("/") if path else ():
        check_name(name, place)


def check_name_to_write(name: str, place: object) -> None:
    """Check the name of a file to create, publish or delete.

    Raises:
        StoreError: the name is invalid.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise StoreError(
            f"{name!r} is not a valid name for a file that shardwise writes below {place}: use "
            "ASCII letters, digits, '.', '_' and '-', at most 255 of them"
        )


def temporary_name(name: str) -> str:
    """Return a new name, under which one writer writes a file until the file is complete.

    Two writers of one file, such as a slow node and the agent that copies its files instead, write
    under two names. So neither renames what the other has not yet completed.
    """
    return f"{name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL such as `s3://bucket/run?region=eu-central-1`.

    The path is written as it is: a space is a space. Only `%` and `?` are written as `%25` and
    `%3F`. The tools of the clouds do the same.

    Attributes:
        scheme: the scheme, in lower case.
        host: the bucket, container or server, with a port if there is one.
        path: the path without leading and trailing `/`; may be empty.
        options: the options in the query.
    """

    scheme: str
    host: str
    path: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        path = "".join(_ESCAPED.get(character, character) for character in self.path)
        query = urllib.parse.urlencode(dict(self.options), safe=":/")
        return f"{self.scheme}://{self.host}{path and '/'}{path}{query and '?'}{query}"

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def retry_seconds(self) -> float:
        """How long a failed request is repeated.

        Raises:
            StoreError: the option `retry` is not a number of seconds.
        """
        return self.number("retry", RETRY_SECONDS, smallest=0.0)

    def below(self, name: str) -> StoreUrl:
        """Return the URL one level below, with the same options."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def is_set(self, option: str) -> bool:
        """Return the value of an option that is `true` or `false`; False by default.

        Raises:
            StoreError: the option has another value.
        """
        value = self.options.get(option, "false").lower()
        if value not in ("true", "false"):
            raise StoreError(f"{self}: {option}={value}: expected true or false")
        return value == "true"

    def number(self, option: str, default: float, *, smallest: float) -> float:
        """Return the value of an option that is a number.

        Raises:
            StoreError: the option is not a number, or is smaller than `smallest`.
        """
        text = self.options.get(option)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = float("nan")
        if not smallest <= value < float("inf"):
            raise StoreError(f"{self}: {option}={text}: expected a number of at least {smallest:g}")
        return value


def scheme_of(place: str) -> str | None:
    """Return the scheme of a URL in lower case; None if the place is a path."""
    match = _SCHEME.match(place)
    return match.group(1).lower() if match else None


def parse_url(place: str, known: Iterable[str] | None, *, needs_host: bool = True) -> StoreUrl:
    """Parse the URL of a store.

    Args:
        place: the URL.
        known: the names of the options that this kind of store has, besides `retry`; None to allow
            all options.
        needs_host: whether the URL must name a bucket or server.

    Raises:
        StoreError: the URL has no host, unknown options, or a secret.
    """
    scheme = scheme_of(place) or ""
    rest, _, query = place[len(scheme) + 3 :].partition("?")
    host, _, path = rest.partition("/")
    if "@" in host:
        raise StoreError(
            f"{scheme}://…@{host.rpartition('@')[2]}: a URL must not contain user names or "
            "passwords, because URLs are logged: use the environment variables or the "
            "configuration files of the storage's own tools"
        )
    if not host and needs_host:
        raise StoreError(f"{place}: expected {scheme}://HOST/PATH, with a bucket or server as HOST")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    known = list(options) if known is None else sorted({*known, "retry"})
    for name in options:
        if name in known:
            continue
        if _SECRET.search(name):
            raise StoreError(
                f"{scheme}://{rest}: the option {name} looks like a secret, which a URL must not "
                "contain, because URLs are logged: use the environment variables or the "
                "configuration files of the storage's own tools"
            )
        raise StoreError(
            f"{scheme}://{rest}: unknown option {name!r}; {scheme}:// has {', '.join(known)}"
        )
    if len(pairs) != len(options):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StoreError(
            f"{scheme}://{rest}: the option {twice} is given twice: remove one of them"
        )
    path = path.replace("%3F", "?").replace("%3f", "?").replace("%25", "%").strip("/")
    if any(part in ("", ".", "..") for part in path.split("/") if path):
        raise StoreError(
            f"{scheme}://{rest}: the path has an empty, '.' or '..' component; write the path "
            "without it"
        )
    return StoreUrl(scheme, host, path, options)
