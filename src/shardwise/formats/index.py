"""Encodes the layout of a foreign checkpoint as bytes (its index), which a file can keep."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from shardwise.decoding import prepare_decoding
from shardwise.errors import FormatError, StateError, StoreError
from shardwise.formats.file_tree import FileTree
from shardwise.layout.columns import Int
from shardwise.manifest.checksums import crc32
from shardwise.manifest.layout import Layout, Pieces, StoredFile
from shardwise.manifest.manifest import LARGEST_INTEGER, ObjectEntry, TensorEntry
from shardwise.manifest.names import INDEX_MAGIC
from shardwise.manifest.pieces import check_table_size
from shardwise.manifest.validate import MOST_PIECES
from shardwise.store import resolve_links, store_below
from shardwise.store.local_files import write_atomically

MOST_DIMS = 64
BODY_START = len(INDEX_MAGIC) + 4

RECREATE_REMEDY = "open the checkpoint again, after deleting its index file if you pass index="

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]


class _PackedTable(msgspec.Struct, frozen=True, array_like=True):
    """Columns of pieces, each stored as compressed differences between its rows."""

    rows: Annotated[int, msgspec.Meta(ge=0, le=MOST_PIECES)]
    dims: Annotated[int, msgspec.Meta(ge=0, le=MOST_DIMS)]
    columns: tuple[bytes, ...]


@prepare_decoding
class _IndexBody(msgspec.Struct, frozen=True, array_like=True):
    format: str
    files: tuple[tuple[str, Count, bytes | None], ...]
    tensors: tuple[TensorEntry, ...]
    pieces: _PackedTable
    replicas: _PackedTable
    replica_names: tuple[tuple[str, ...], bytes]
    terms: tuple[int, ...]
    objects: tuple[ObjectEntry, ...]
    step: int | None
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    left_out: tuple[str, ...]
    missing_files: dict[str, str]


def encode_index(layout: Layout) -> bytes:
    """Encode the layout of a foreign checkpoint as bytes."""
    index = _IndexBody(
        layout.format,
        tuple((file.name, file.size, file.content) for file in layout.files),
        layout.tensors,
        _pack_table(layout.pieces),
        _pack_table(layout.replicas),
        _pack_names(layout.replica_names),
        layout.terms,
        layout.objects,
        layout.step,
        layout.world_size,
        layout.left_out,
        dict(layout.missing_files),
    )
    body = msgspec.msgpack.encode(index)
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
        index = msgspec.msgpack.decode(memoryview(data)[BODY_START:], type=_IndexBody)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed_error(str(error)) from error
    return Layout(
        format=index.format,
        files=tuple(StoredFile(*file) for file in index.files),
        tensors=index.tensors,
        pieces=_unpack_table(index.pieces),
        replicas=_unpack_table(index.replicas),
        replica_names=_unpack_names(*index.replica_names, index.replicas.rows),
        terms=index.terms,
        objects=index.objects,
        step=index.step,
        world_size=index.world_size,
        left_out=index.left_out,
        missing_files=index.missing_files,
    )


def _malformed_error(reason: str) -> FormatError:
    return FormatError(f"it is malformed: {reason}")


def _pack_table(pieces: Pieces) -> _PackedTable:
    by_dim = (*pieces.offset.T, *pieces.shape.T, *pieces.stride.T)
    columns = (pieces.tensor, pieces.file, pieces.start, *by_dim)
    differences = (np.diff(column, prepend=0).astype("<i8") for column in columns)
    packed = tuple(zlib.compress(column.tobytes(), 1) for column in differences)
    return _PackedTable(len(pieces), pieces.offset.shape[1], packed)


def _unpack_table(table: _PackedTable) -> Pieces:
    dims = table.dims
    if len(table.columns) != 3 + 3 * dims:
        raise _malformed_error(
            f"a table has {len(table.columns)} columns, but {dims} dimensions need {3 + 3 * dims}"
        )
    check_table_size(table.rows, dims)
    columns = np.empty((3 + 3 * dims, table.rows), np.int64)
    for column, packed_column in zip(columns, table.columns, strict=True):
        np.cumsum(_decompress_column(packed_column, 8 * table.rows), out=column)
    by_dim = columns[3:].reshape(3, dims, table.rows).transpose(0, 2, 1)
    offset, shape, stride = (np.ascontiguousarray(each) for each in by_dim)
    return Pieces(columns[0], columns[1], columns[2], offset, shape, stride)


def _pack_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    """Return the distinct names, and for each row the index of its name, compressed."""
    name_index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    column = np.array([name_index[name] for name in names], "<i8")
    return tuple(name_index), zlib.compress(column.tobytes(), 1) if names else b""


def _unpack_names(names: tuple[str, ...], column: bytes, rows: int) -> tuple[str, ...]:
    if not names:
        return ()
    values = _decompress_column(column, 8 * rows)
    if rows and not 0 <= int(values.min()) <= int(values.max()) < len(names):
        raise _malformed_error("the name of a replica is missing")
    return tuple(names[i] for i in values.tolist())


def _decompress_column(data: bytes, size: int) -> Int:
    decompressor = zlib.decompressobj()
    try:
        values = decompressor.decompress(data, size + 1) if data else b""
    except zlib.error as error:
        raise _malformed_error(str(error)) from error
    if len(values) != size:
        raise _malformed_error(f"a column of a table does not have {size} bytes")
    return np.frombuffer(values, "<i8").astype(np.int64)


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
