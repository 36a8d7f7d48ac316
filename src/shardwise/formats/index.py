"""Encodes the layout of a foreign checkpoint as bytes (its index), which a file can keep."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardwise.errors import FormatError, StateError, StoreError
from shardwise.formats.file_tree import FileTree
from shardwise.layout.columns import Int
from shardwise.manifest.checksums import crc32
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import LARGEST_INTEGER
from shardwise.manifest.names import INDEX_MAGIC
from shardwise.manifest.pieces import check_table_size
from shardwise.manifest.validate import MOST_PIECES
from shardwise.store import resolve_links, store_below
from shardwise.store.local_files import write_atomically

MOST_DIMS = 64
BODY_START = len(INDEX_MAGIC) + 4

RECREATE_REMEDY = "open the checkpoint again, after deleting its index file if you pass index="


def _encode_array(array: object) -> tuple[tuple[int, ...], bytes]:
    """Return the shape of a column of integers, and the compressed differences of its rows."""
    if not isinstance(array, np.ndarray):
        raise NotImplementedError
    columns = array.reshape(len(array), -1).T if array.size else array.reshape(0, 0)
    differences = np.diff(columns, axis=1, prepend=0).astype("<i8")
    return array.shape, zlib.compress(differences.tobytes(), 1)


def _decode_array(_: object, encoded: Any) -> Int:
    shape, data = msgspec.convert(encoded, tuple[tuple[int, ...], bytes])
    rows, dims = (*shape, 1)[:2]
    if not 0 < len(shape) < 3 or not 0 <= rows <= MOST_PIECES or not 0 <= dims <= MOST_DIMS:
        raise ValueError(f"a table cannot have shape {list(shape)}")
    check_table_size(rows, dims)
    columns = _decompress(data, 8 * rows * dims).reshape(dims, rows).cumsum(axis=1)
    return np.ascontiguousarray(columns.T).reshape(shape)


def _decompress(data: bytes, size: int) -> Int:
    try:
        values = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(values) != size:
        raise ValueError(f"a column of a table does not have {size} bytes")
    return np.frombuffer(values, "<i8").astype(np.int64)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(Layout, dec_hook=_decode_array)
"""Made at import, because msgspec 0.22 crashes if two threads prepare a type at the same time."""


def encode_index(layout: Layout) -> bytes:
    """Encode the layout of a foreign checkpoint as bytes."""
    body = _ENCODER.encode(layout)
    return INDEX_MAGIC + crc32(body).to_bytes(4, "little") + body


def is_intact_index(data: bytes) -> bool:
    """Return whether these bytes are an intact result of `encode_index`."""
    checksum = crc32(memoryview(data)[BODY_START:])
    return data[:BODY_START] == INDEX_MAGIC + checksum.to_bytes(4, "little")


def decode_index(data: bytes, checkpoint: str) -> Layout:
    """Decode the result of `encode_index`. The caller must check it with `validate_layout`.

    Args:
        data: the encoded index.
        checkpoint: the path of the foreign checkpoint, for messages.

    Raises:
        FormatError: the data is not an index, or is damaged.
    """
    try:
        return _decode_index(data)
    except FormatError as error:
        raise FormatError(f"the index of {checkpoint}: {error}; {RECREATE_REMEDY}") from error


def _decode_index(data: bytes) -> Layout:
    if not data.startswith(INDEX_MAGIC):
        raise FormatError("it does not begin like an index of a foreign checkpoint")
    if not is_intact_index(data):
        raise FormatError("it is damaged or truncated")
    try:
        layout = _DECODER.decode(memoryview(data)[BODY_START:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"it is malformed: {error}") from error
    for pieces in (layout.pieces, layout.replicas):
        columns = [getattr(pieces, each.name) for each in fields(pieces)]
        if len({len(c) for c in columns}) > 1 or len({c.shape[1:] for c in columns}) > 2:
            raise FormatError("it is malformed: the columns of a table have different lengths")
    if not all(0 <= file.size <= LARGEST_INTEGER for file in layout.files):
        raise FormatError("it is malformed: the size of a file is out of range")
    return layout


STAMP_LENGTH = 32
"""The number of characters in the stamp at the start of an index file.

The stamp identifies the files of the checkpoint and all options."""


def read_or_write_index(
    tree: FileTree,
    index: str | os.PathLike[str],
    read: Callable[[FileTree], Layout],
    options: str = "",
) -> Layout:
    """Return the layout of a foreign checkpoint from a file; write the file if it is outdated.

    Args:
        tree: the files of the checkpoint.
        index: the path of the index file. The file is rewritten if it is damaged, or if the size or
            version of a file of the checkpoint changed.
        read: a function that reads the checkpoint.
        options: text that identifies all other inputs of `read`.

    Raises:
        StateError: the file exists and is not an index.
        StoreError: the file cannot be written.
    """
    path = Path(index)
    stamp = _compute_stamp(tree, path, options)
    if _is_index_file(path):
        head, _, body = path.read_bytes().partition(b"\n")
        if head == stamp and is_intact_index(body):
            return decode_index(body, str(tree))
    layout = read(tree)
    try:
        with write_atomically(path, mode=0o666) as file:
            file.write(stamp + b"\n" + encode_index(layout))
    except OSError as error:
        raise StoreError(
            f"index={str(path)!r}: the file cannot be written: {error.strerror}; name a file in a "
            "writable directory, or open the checkpoint without index="
        ) from error
    return layout


def _is_index_file(path: Path) -> bool:
    """Return whether an index file exists at a path; an empty file counts as missing.

    Raises:
        StateError: the path exists and is not an index file.
    """
    if not path.exists():
        return False
    if path.is_file():
        with open(path, "rb") as file:
            head = file.read(STAMP_LENGTH + 1)
        if not head or re.fullmatch(rb"[0-9a-f]{%d}\n" % STAMP_LENGTH, head):
            return bool(head)
    raise StateError(
        f"index={str(path)!r}: not an index file; refusing to overwrite it: name a new file"
    )


def _compute_stamp(tree: FileTree, index: Path, options: str) -> bytes:
    """Return a digest of the options, and of the name, size and version of each file."""
    index_file = str(index.resolve())
    stamp_lines = [options]
    for name, status in tree.statuses.items():
        file = tree.store if tree.single_file is not None else store_below(tree.store, name)
        if str(resolve_links(file)) != index_file:
            stamp_lines.append(f"{name}\0{status.size}\0{status.version}")
    return (
        hashlib.blake2b("\n".join(stamp_lines).encode(), digest_size=STAMP_LENGTH // 2)
        .hexdigest()
        .encode()
    )
