"""The index of a foreign checkpoint: all that was found of it, as bytes, without its tensors."""

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
    """Columns of pieces, one after another, each as differences of its rows."""

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
    """A foreign checkpoint's description, as bytes."""
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
        raise FormatError(f"the index has {len(table.columns)} columns for {dims} dimensions")
    check_width(table.rows, dims)
    rows = np.empty((3 + 3 * dims, table.rows), np.int64)
    for row, column in zip(rows, table.columns, strict=True):
        np.cumsum(_inflated(column, 8 * table.rows), out=row)
    parts = rows[3:].reshape(3, dims, table.rows).transpose(0, 2, 1)
    offset, shape, stride = (np.ascontiguousarray(part) for part in parts)
    return PieceTable(Pieces(rows[0], rows[1], rows[2], offset, shape), stride)


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
