"""The index of a foreign checkpoint: all that was found of it, as bytes, without its tensors."""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec
import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, ForeignFile, Laid
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
    """Columns of pieces, one after another, each as differences of its rows."""

    rows: Annotated[int, msgspec.Meta(ge=0, le=MOST_PIECES)]
    dims: Annotated[int, msgspec.Meta(ge=0, le=MOST_DIMS)]
    columns: tuple[bytes, ...]


class _Index(msgspec.Struct, frozen=True, array_like=True):
    format: str
    files: tuple[_File, ...]
    tensors: tuple[TensorEntry, ...]
    laid: _Table
    replicas: _Table
    replica_names: tuple[tuple[str, ...], bytes]
    averages: dict[str, tuple[str, ...]]
    objects: tuple[ObjectEntry, ...]
    step: int | None
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    left_out: tuple[str, ...]
    absent: dict[str, str]


def encode_index(foreign: Foreign) -> bytes:
    """A foreign checkpoint's description, as bytes."""
    index = _Index(
        foreign.format,
        tuple(_File(file.name, file.size, file.content) for file in foreign.files),
        foreign.tensors,
        _pack(foreign.laid),
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
    """Whether these bytes are what `encode_index` gave."""
    sum_ = crc32(memoryview(data)[_START:])
    return data.startswith(MAGIC) and data[len(MAGIC) : _START] == sum_.to_bytes(4, "little")


def decode_index(data: bytes) -> Foreign:
    """The inverse of `encode_index`. What it claims of files and tensors is not checked here.

    Raises:
        FormatError: these bytes are not an index, or were altered.
    """
    if not data.startswith(MAGIC):
        raise FormatError("this is no index of a foreign checkpoint")
    if not is_index(data):
        raise FormatError("the index was altered, or cut off: remove it, and open again")
    try:
        index = msgspec.msgpack.decode(memoryview(data)[_START:], type=_Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"the index is malformed: {error}") from error
    return Foreign(
        format=index.format,
        files=tuple(ForeignFile(file.name, file.size, file.content) for file in index.files),
        tensors=index.tensors,
        laid=_unpack(index.laid),
        replicas=_unpack(index.replicas),
        replica_names=_unpack_names(*index.replica_names, index.replicas.rows),
        averages=index.averages,
        objects=index.objects,
        step=index.step,
        world_size=index.world_size,
        left_out=index.left_out,
        absent=index.absent,
    )


def _pack(laid: Laid) -> _Table:
    pieces = laid.pieces
    tables = (*pieces.offset.T, *pieces.shape.T, *laid.stride.T)
    columns = (pieces.tensor, pieces.file, pieces.start, *tables)
    steps = (np.diff(column, prepend=0).astype("<i8") for column in columns)
    packed = tuple(zlib.compress(column.tobytes(), 1) for column in steps)
    return _Table(len(pieces), pieces.offset.shape[1], packed)


def _unpack(table: _Table) -> Laid:
    dims = table.dims
    if len(table.columns) != 3 + 3 * dims:
        raise FormatError(f"the index has {len(table.columns)} columns for {dims} dimensions")
    check_width(table.rows, dims)
    rows = np.empty((3 + 3 * dims, table.rows), np.int64)
    for row, column in zip(rows, table.columns, strict=True):
        np.cumsum(_inflated(column, 8 * table.rows), out=row)
    parts = rows[3:].reshape(3, dims, table.rows).transpose(0, 2, 1)
    offset, shape, stride = (np.ascontiguousarray(part) for part in parts)
    return Laid(Pieces(rows[0], rows[1], rows[2], offset, shape), stride)


def _pack_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    """Names, each once, and which of them each row has."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    column = np.array([number[name] for name in names], "<i8")
    return tuple(number), zlib.compress(column.tobytes(), 1) if names else b""


def _unpack_names(names: tuple[str, ...], column: bytes, rows: int) -> tuple[str, ...]:
    if not names:
        return ()
    found = _inflated(column, 8 * rows)
    if rows and not 0 <= int(found.min()) <= int(found.max()) < len(names):
        raise FormatError("the index is malformed: a replica has a name that is not there")
    return tuple(names[i] for i in found.tolist())


def _inflated(data: bytes, size: int) -> Int:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, size + 1) if data else b""
    except zlib.error as error:
        raise FormatError(f"the index is malformed: {error}") from error
    if len(found) != size:
        raise FormatError("the index is malformed: a column has another length than it says")
    return np.frombuffer(found, "<i8").astype(np.int64)
