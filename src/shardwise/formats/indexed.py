"""Indices of foreign checkpoints, kept in files, so that one is opened at once the next time."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign
from shardwise.formats.index import decode_index, encode_index
from shardwise.formats.tree import Tree


def read_indexed(
    tree: Tree, index: str | os.PathLike[str], read: Callable[[Tree], Foreign], terms: str = ""
) -> Foreign:
    """What an index says of a place; if it is missing, damaged or out of date, it is made anew.

    Args:
        index: a file; of a checkpoint whose files have other sizes or times, it is out of date.
        terms: what else the reading depends on.
    """
    path = Path(index)
    stamp = _stamp(tree, path, terms)
    if path.is_file():
        head, _, body = path.read_bytes().partition(b"\n")
        if head == stamp:
            try:
                return decode_index(body)
            except FormatError:
                pass  # it is made anew
    foreign = read(tree)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(stamp + b"\n" + encode_index(foreign))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return foreign


def _stamp(tree: Tree, index: Path, terms: str) -> bytes:
    """What changes when a file does; the index itself, which may lie beside, does not count."""
    own = index.resolve()
    lines = [terms]
    for name, size in tree.sizes.items():
        path = tree.path if tree.only is not None else tree.path / name
        if path.resolve() != own:
            lines.append(f"{name}\0{size}\0{path.stat().st_mtime_ns}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest().encode()
