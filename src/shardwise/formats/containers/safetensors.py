"""Headers of safetensors files: the arrays in a file, and where each one is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.foreign import StoredArray
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Dims

LARGEST_HEADER = 100_000_000
"""The limit of safetensors itself."""
METADATA = "__metadata__"
_DTYPES = {kind.code: name for name, kind in DTYPES.items() if kind.code is not None}
_DTYPES |= {"F8_E8M0": "float8_e8m0fnu"}
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@dataclass(frozen=True, slots=True)
class Header:
    """The arrays of a file by name, its metadata, and the reasons why arrays were left out."""

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]
    left_out: Mapping[str, str]


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Dims
    data_offsets: tuple[_Offset, _Offset]


def is_safetensors(head: bytes) -> bool:
    """Whether a file with these first bytes may be a safetensors file."""
    return len(head) > 8 and int.from_bytes(head[:8], "little") <= LARGEST_HEADER and head[8] == 123


def read_header(part: FileRange) -> Header:
    """Read the header of a file. No array is read.

    Raises:
        FormatError: the file is malformed or cut off, arrays overlap or leave holes, or the size
            of an array does not match its shape.
    """
    size = int.from_bytes(part.read(0, 8), "little")
    if size > LARGEST_HEADER:
        raise FormatError(f"{part.where}: a header of {size} bytes; not a safetensors file")
    entries, metadata = _decoded(part, part.read(8, size))
    data = part.within(8 + size, part.size - 8 - size, "its arrays")
    arrays: dict[str, StoredArray] = {}
    left_out: dict[str, str] = {}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != at or stop < start or stop > data.size:
            raise FormatError(
                f"{part.where}: {name[:200]!r} overlaps another array, leaves a hole or is cut off"
            )
        at = stop
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            left_out[name] = f"{entry.dtype[:40]!r} is an unknown dtype"
            continue
        if math.prod(entry.shape) * DTYPES[dtype].itemsize != stop - start:
            raise FormatError(
                f"{part.where}: {name[:200]!r} has {stop - start} bytes, wrong for its shape"
            )
        stride = tuple(math.prod(entry.shape[i + 1 :]) for i in range(len(entry.shape)))
        where = data.offset + start
        arrays[name] = StoredArray(part.number, where, dtype, entry.shape, stride)
    if at != data.size:
        raise FormatError(f"{part.where}: it has bytes after its last array")
    in_order = {name: arrays[name] for name in entries if name in arrays}
    return Header(in_order, metadata, left_out)


def _decoded(part: FileRange, text: bytes) -> tuple[dict[str, _Array], dict[str, str]]:
    try:
        header: Any = msgspec.json.decode(text, type=dict[str, Any])
        metadata = msgspec.convert(header.pop(METADATA, {}), dict[str, str])
        return msgspec.convert(header, dict[str, _Array]), metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{part.where}: its header is malformed: {error}") from error
