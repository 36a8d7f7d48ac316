"""The index of a foreign checkpoint: the encoded description, and the file that caches it."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from shardwise.errors import FormatError, StateError, StoreError
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable
from shardwise.formats.tree import Tree
from shardwise.manifest.checksums import crc32
from shardwise.manifest.manifest import LARGEST, ObjectEntry, TensorEntry
from shardwise.manifest.table import Int, Pieces, check_width
from shardwise.manifest.validate import MOST_PIECES

MAGIC = b"shardwise-index-2\n"
MOST_DIMS = 64
_START = len(MAGIC) + 4

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class _File(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size: Count
    content: bytes | None


class _Table(msgspec.Struct, frozen=True, array_like=True):
    """Columns of pieces, each stored as compressed differences between its rows."""

    rows: Annotated[int, msgspec.Meta(ge=0, le=MOST_PIECES)]
    dims: Annotated[int, msgspec.Meta(ge=0, le=MOST_DIMS)]
    columns: tuple[bytes, ...]


class _Index(msgspec.Struct, frozen=True, array_like=True):
    format: str
    files: tuple[_File, ...]
    tensors: tuple[TensorEntry, ...]
    table: _Table
    replicas: _Table
    replica_names: tuple[tuple[str, ...], bytes]
    averages: dict[str, tuple[str, ...]]
    objects: tuple[ObjectEntry, ...]
    step: int | None
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    left_out: tuple[str, ...]
    absent: dict[str, str]


def encode_index(foreign: Foreign) -> bytes:
    """Return the description of a foreign checkpoint as bytes."""
    index = _Index(
        foreign.format,
        tuple(_File(file.name, file.size, file.content) for file in foreign.files),
        foreign.tensors,
        _pack(foreign.table),
        _pack(foreign.replicas),
        _pack_names(foreign.replica_names),
        dict(foreign.averages),
        foreign.objects,
        foreign.step,
        foreign.world_size,
        foreign.left_out,
        dict(foreign.absent),
    )
    body = msgspec.msgpack.encode(index)
    return MAGIC + crc32(body).to_bytes(4, "little") + body


def is_index(data: bytes) -> bool:
    """Return whether these bytes are an intact result of `encode_index`."""
    sum_ = crc32(memoryview(data)[_START:])
    return data.startswith(MAGIC) and data[len(MAGIC) : _START] == sum_.to_bytes(4, "little")


def decode_index(data: bytes) -> Foreign:
    """Decode the result of `encode_index`. Check the description with `validate.checked`.

    Raises:
        FormatError: the data is not an index, or is damaged.
    """
    if not data.startswith(MAGIC):
        raise FormatError("the data is not an index of a foreign checkpoint")
    if not is_index(data):
        raise FormatError(
            "the index is damaged or truncated: delete the file and open the checkpoint again"
        )
    try:
        index = msgspec.msgpack.decode(memoryview(data)[_START:], type=_Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"the index is malformed: {error}") from error
    return Foreign(
        format=index.format,
        files=tuple(ForeignFile(file.name, file.size, file.content) for file in index.files),
        tensors=index.tensors,
        table=_unpack(index.table),
        replicas=_unpack(index.replicas),
        replica_names=_unpack_names(*index.replica_names, index.replicas.rows),
        averages=index.averages,
        objects=index.objects,
        step=index.step,
        world_size=index.world_size,
        left_out=index.left_out,
        absent=index.absent,
    )


def _pack(table: PieceTable) -> _Table:
    pieces = table.pieces
    tables = (*pieces.offset.T, *pieces.shape.T, *table.stride.T)
    columns = (pieces.tensor, pieces.file, pieces.start, *tables)
    steps = (np.diff(column, prepend=0).astype("<i8") for column in columns)
    packed = tuple(zlib.compress(column.tobytes(), 1) for column in steps)
    return _Table(len(pieces), pieces.offset.shape[1], packed)


def _unpack(table: _Table) -> PieceTable:
    dims = table.dims
    if len(table.columns) != 3 + 3 * dims:
        raise FormatError(
            f"the index is malformed: {len(table.columns)} columns for {dims} dimensions"
        )
    check_width(table.rows, dims)
    rows = np.empty((3 + 3 * dims, table.rows), np.int64)
    for row, column in zip(rows, table.columns, strict=True):
        np.cumsum(_inflated(column, 8 * table.rows), out=row)
    parts = rows[3:].reshape(3, dims, table.rows).transpose(0, 2, 1)
    offset, shape, stride = (np.ascontiguousarray(part) for part in parts)
    return PieceTable(Pieces(rows[0], rows[1], rows[2], offset, shape), stride)


def _pack_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    """Return the distinct names, and for each row the position of its name."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    column = np.array([number[name] for name in names], "<i8")
    return tuple(number), zlib.compress(column.tobytes(), 1) if names else b""


def _unpack_names(names: tuple[str, ...], column: bytes, rows: int) -> tuple[str, ...]:
    if not names:
        return ()
    found = _inflated(column, 8 * rows)
    if rows and not 0 <= int(found.min()) <= int(found.max()) < len(names):
        raise FormatError("the index is malformed: the name of a replica is missing")
    return tuple(names[i] for i in found.tolist())


def _inflated(data: bytes, size: int) -> Int:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, size + 1) if data else b""
    except zlib.error as error:
        raise FormatError(f"the index is malformed: {error}") from error
    if len(found) != size:
        raise FormatError("the index is malformed: a column has the wrong length")
    return np.frombuffer(found, "<i8").astype(np.int64)


_STAMP = 32
"""The number of characters of the stamp at the start of an index file."""


def read_indexed(
    tree: Tree, index: str | os.PathLike[str], read: Callable[[Tree], Foreign], options: str = ""
) -> bytes:
    """Return the index of a foreign checkpoint from a file; write the file if needed.

    Args:
        tree: the checkpoint.
        index: the index file. It is rewritten if it is damaged, or if the size or modification time
            of a file of the checkpoint changed.
        read: reads the checkpoint.
        options: text that identifies all other inputs of `read`.

    Raises:
        StateError: the file exists and is not an index.
        StoreError: the file cannot be written.
    """
    path = Path(index)
    stamp = _stamp(tree, path, options)
    if _is_index(path):
        head, _, body = path.read_bytes().partition(b"\n")
        if head == stamp and is_index(body):
            return body
    body = encode_index(read(tree))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(stamp + b"\n" + body)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(
            f"index={str(path)!r}: the file cannot be written: {error.strerror}; name a file in a "
            "writable directory, or open the checkpoint without index="
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return body


def _is_index(path: Path) -> bool:
    """Return whether an index file exists at a path.

    Raises:
        StateError: the path exists and is not an index file.
    """
    if not path.exists():
        return False
    if path.is_file():
        with open(path, "rb") as file:
            head = file.read(_STAMP + 1)
        if not head or re.fullmatch(rb"[0-9a-f]{%d}\n" % _STAMP, head):
            return bool(head)
    raise StateError(
        f"index={str(path)!r}: not an index file; refusing to overwrite it: name a new file"
    )


def _stamp(tree: Tree, index: Path, options: str) -> bytes:
    """Return a digest of the options, and of the name, size and time of every other file."""
    own = index.resolve()
    lines = [options]
    for name, size in tree.sizes.items():
        path = tree.path if tree.only is not None else tree.path / name
        if path.resolve() != own:
            lines.append(f"{name}\0{size}\0{path.stat().st_mtime_ns}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_STAMP // 2).hexdigest().encode()
