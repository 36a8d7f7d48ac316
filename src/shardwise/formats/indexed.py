"""Indices of foreign checkpoints, kept in files, so that one is opened at once the next time."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardwise.errors import StateError, StoreError
from shardwise.formats.foreign import Foreign
from shardwise.formats.index import encode_index, is_index
from shardwise.formats.tree import Tree

_STAMP = 32
"""Letters of what stands at the beginning."""


def read_indexed(
    tree: Tree, index: str | os.PathLike[str], read: Callable[[Tree], Foreign], terms: str = ""
) -> bytes:
    """The index of a place, encoded; if it is missing, damaged or out of date, it is made anew.

    Args:
        index: a file; of a checkpoint whose files have other sizes or times, it is out of date.
        terms: what else the reading depends on.

    Raises:
        StateError: the file is something else, which is left alone.
        StoreError: it cannot be written.
    """
    path = Path(index)
    stamp = _stamp(tree, path, terms)
    if _is_index(path):
        head, _, body = path.read_bytes().partition(b"\n")
        if head == stamp and is_index(body):
            return body
    body = encode_index(read(tree))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(stamp + b"\n" + body)
        os.replace(beside, path)
    except OSError as error:
        raise StoreError(
            f"index={str(path)!r}: it cannot be written: {error.strerror}; name a file in a "
            "directory that can be, or open the checkpoint without"
        ) from error
    finally:
        with suppress(OSError):
            beside.unlink()
    return body


def _is_index(path: Path) -> bool:
    """Whether a file is there, of those that are made anew as need be.

    Raises:
        StateError: something else is there.
    """
    if not path.exists():
        return False
    if path.is_file():
        with open(path, "rb") as file:
            head = file.read(_STAMP + 1)
        if not head or re.fullmatch(rb"[0-9a-f]{%d}\n" % _STAMP, head):
            return bool(head)
    raise StateError(f"index={str(path)!r}: this is no index, and is left alone: name a new file")


def _stamp(tree: Tree, index: Path, terms: str) -> bytes:
    """What changes when a file does; the index itself, which may lie beside, does not count."""
    own = index.resolve()
    lines = [terms]
    for name, size in tree.sizes.items():
        path = tree.path if tree.only is not None else tree.path / name
        if path.resolve() != own:
            lines.append(f"{name}\0{size}\0{path.stat().st_mtime_ns}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_STAMP // 2).hexdigest().encode()
