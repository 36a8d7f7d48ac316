"""A data file: a safetensors header, the pieces end to end, the rank's objects, the checksums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from shardwise.layout import Box
from shardwise.manifest.checksums import block_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.names import CHECKSUMS_KEY, OBJECTS_KEY

ALIGNMENT = 4096
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class DataFile:
    """Positions of the parts of a data file, in bytes from its start.

    header `[0, data_at)` · pieces `[data_at, objects_at)` · objects `[objects_at, checksums_at)`
    · checksums of all before, `[checksums_at, size)`.
    """

    header: bytes
    data_at: int
    objects_at: int
    checksums_at: int
    size: int


@dataclass(frozen=True, slots=True)
class Listed:
    """The pieces' entries in the header, as JSON without braces, and the size of all pieces."""

    encoded: bytes
    nbytes: int


def list_pieces(pieces: Iterable[tuple[str, str, tuple[int, ...], Box]]) -> Listed:
    """Return the header entries of pieces, in the given order.

    Args:
        pieces: name, dtype and global shape of a tensor, and the box that is stored.
    """
    entries: dict[str, object] = {}
    at = 0
    for name, dtype, shape, box in pieces:
        code, stored_shape, nbytes = _stored(dtype, box.shape)
        key = name if box.shape == shape else f"{name}{box}"
        while key in entries or key == METADATA:
            key += "'"
        entries[key] = {"dtype": code, "shape": stored_shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return Listed(_without_braces(entries), at)


def lay_out(listed: Listed, objects_bytes: int, metadata: dict[str, str]) -> DataFile:
    """Return the layout of a data file.

    Args:
        objects_bytes: length of the encoded per-rank objects; 0 without any.
        metadata: metadata of the safetensors header.
    """
    objects_at, at = listed.nbytes, listed.nbytes + objects_bytes
    parts = [_without_braces({METADATA: metadata}), listed.encoded]
    if objects_bytes:
        parts.append(_without_braces({OBJECTS_KEY: _raw_bytes(objects_at, at)}))
    header_bytes = _padded_size(parts, at)
    table = 4 * block_count(header_bytes + at)
    encoded = _joined([*parts, _checksums(at, at + table)])
    padding = header_bytes - 8 - len(encoded)
    header = (len(encoded) + padding).to_bytes(8, "little") + encoded + b" " * padding
    start = header_bytes
    return DataFile(header, start, start + objects_at, start + at, start + at + table)


def _padded_size(parts: list[bytes], data_bytes: int) -> int:
    # The entry of the checksums is not known yet, but not longer than that for twice the data.
    widest = _checksums(data_bytes, 2 * data_bytes + (1 << 24))
    needed = 8 + len(_joined([*parts, widest]))
    return -(-needed // ALIGNMENT) * ALIGNMENT


def _checksums(start: int, stop: int) -> bytes:
    return _without_braces({CHECKSUMS_KEY: _raw_bytes(start, stop)})


def _without_braces(entries: dict[str, object]) -> bytes:
    return msgspec.json.encode(entries)[1:-1]


def _joined(parts: list[bytes]) -> bytes:
    return b"{" + b",".join(part for part in parts if part) + b"}"


def _raw_bytes(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


def _stored(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    kind = DTYPES[dtype]
    nbytes = kind.itemsize
    for n in shape:
        nbytes *= n
    if kind.code is not None:
        return kind.code, shape, nbytes
    return "U8", (*shape, kind.itemsize), nbytes
