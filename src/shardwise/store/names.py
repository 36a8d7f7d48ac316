"""The names of files in stores."""

from __future__ import annotations

import os
import re

from shardwise.errors import StoreError

LONGEST_NAME = 255
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


def check_name(name: str, place: str) -> None:
    """Check the name of a file to read. Other programs use names such as `epoch=0-step=10.ckpt`.

    Args:
        place: the place of the file, for messages.

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


def check_path(path: str, place: str) -> None:
    """Check a relative path of a file to read, with `/`. "" is the place itself.

    Raises:
        StoreError: a component of the path is no valid name.
    """
    for name in path.split("/") if path else ():
        check_name(name, place)


def check_name_to_write(name: str, place: str) -> None:
    """Check the name of a file to create, publish or delete.

    Raises:
        StoreError: the name is invalid.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise StoreError(
            f"{name!r} is not a valid name for a file that shardwise writes below {place}: use "
            "ASCII letters, digits, '.', '_' and '-', at most 255 of them"
        )
