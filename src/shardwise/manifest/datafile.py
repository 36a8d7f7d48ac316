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


@dataclass(frozen=True, slots=True)
class DataFile:
    """Where things lie in a data file, in bytes from its start.

    header `[0, data_at)` · pieces `[data_at, objects_at)` · objects `[objects_at, checksums_at)`
    · checksums of all before `[checksums_at, size)`.
    """

    header: bytes
    data_at: int
    objects_at: int
    checksums_at: int
    size: int


def lay_out(
    pieces: Iterable[tuple[str, str, tuple[int, ...], Box]],
    objects_bytes: int,
    metadata: dict[str, str],
) -> DataFile:
    """Lay out a file of these pieces, in this order.

    Args:
        pieces: name, dtype, global shape of the tensor, and the box of it that is stored.
        objects_bytes: length of the encoded per-rank objects; 0 if there are none.
        metadata: goes into the safetensors header.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, box in pieces:
        code, stored_shape, nbytes = _stored(dtype, box.shape)
        key = name if box.shape == shape else f"{name}{box}"
        while key in entries:
            key += "'"
        entries[key] = {"dtype": code, "shape": stored_shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    objects_at = at
    if objects_bytes:
        at += objects_bytes
        entries[OBJECTS_KEY] = _raw_bytes(objects_at, at)
    header_bytes = _padded_size(entries, at)
    table = 4 * block_count(header_bytes + at)
    entries[CHECKSUMS_KEY] = _raw_bytes(at, at + table)
    encoded = msgspec.json.encode(entries)
    padding = header_bytes - 8 - len(encoded)
    header = (len(encoded) + padding).to_bytes(8, "little") + encoded + b" " * padding
    start = header_bytes
    return DataFile(header, start, start + objects_at, start + at, start + at + table)


def _padded_size(entries: dict[str, object], data_bytes: int) -> int:
    # The table's own entry is not known yet: its numbers are at most those of twice the data.
    widest = {**entries, CHECKSUMS_KEY: _raw_bytes(data_bytes, 2 * data_bytes + (1 << 24))}
    needed = 8 + len(msgspec.json.encode(widest))
    return -(-needed // ALIGNMENT) * ALIGNMENT


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
