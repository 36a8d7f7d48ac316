"""Headers of safetensors files: the names, dtypes, shapes and offsets of the arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import Count, Dims
from shardwise.parts.formats.containers.ranges import FileRange
from shardwise.parts.formats.foreign import StoredArray

LARGEST_HEADER = 100_000_000
"""The size of the largest header, in bytes, that the library safetensors accepts."""
METADATA = "__metadata__"
_FLOAT4_X2 = "float4_e2m1fn_x2"
"""An element of torch packs two 4-bit numbers. The last dimension in safetensors counts numbers, so
it is twice as long as in torch."""
_CODES: Mapping[str, str] = {
    **{n: d.safetensors_code for n, d in DTYPES.items() if d.safetensors_code is not None},
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    _FLOAT4_X2: "F4",
}
"""The codes of dtypes in safetensors 0.8, by the name of the dtype in torch.

Data files of shardwise store the four dtypes that are listed here one by one as bytes, because
older safetensors lack their codes."""
_DTYPES = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        arrays: for each name, its array.
        metadata: the text for each key of the metadata.
        left_out: for the name of each array that is left out, the reason.
    """

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]
    left_out: Mapping[str, str]


@prepare_decoding
class _ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Dims
    data_offsets: tuple[Count, Count]


def describe_array(dtype: str, shape: Sequence[int], start: int) -> dict[str, Any] | None:
    """Return the entry of a contiguous array in a header; None if safetensors lacks its dtype.

    Args:
        dtype: torch's name.
        shape: the shape in torch.
        start: the offset of the first element in the data, in bytes.
    """
    if dtype not in _CODES:
        return None
    stop = start + math.prod(shape) * DTYPES[dtype].itemsize
    if dtype == _FLOAT4_X2 and shape:
        shape = (*shape[:-1], 2 * shape[-1])
    return {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, stop]}


def is_safetensors(head: bytes) -> bool:
    """Return whether a file that begins with these bytes may be a safetensors file."""
    return (
        len(head) > 8 and int.from_bytes(head[:8], "little") <= LARGEST_HEADER and head[8:9] == b"{"
    )


def read_header(file_range: FileRange) -> Header:
    """Read the header of a file. No array is read.

    Raises:
        FormatError: the file is malformed or truncated, arrays overlap or leave gaps, or the size
            of an array does not match its shape.
    """
    size = int.from_bytes(file_range.read(0, 8), "little")
    if size > LARGEST_HEADER:
        raise FormatError(
            f"{file_range.label}: not a safetensors file: its header would have {size} bytes, but "
            f"at most {LARGEST_HEADER} are allowed: copy the file again from an intact source"
        )
    entries, metadata = _decode_header(file_range, file_range.read(8, size))
    data = file_range.subrange(8 + size, file_range.size - 8 - size, "the arrays")
    arrays: dict[str, StoredArray] = {}
    left_out: dict[str, str] = {}
    previous_end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != previous_end or stop < start or stop > data.size:
            raise FormatError(
                f"{file_range.label}: {name[:200]!r} is at bytes [{start}, {stop}) of "
                f"{data.size}, which overlaps another array, leaves a gap or is outside of the "
                "file: copy the file again"
            )
        previous_end = stop
        dtype, shape = _DTYPES.get(entry.dtype), entry.shape
        if dtype is None:
            left_out[name] = f"torch has no dtype for {entry.dtype[:40]!r}"
            continue
        if dtype == _FLOAT4_X2:
            if not shape or shape[-1] % 2:
                left_out[name] = f"torch has no {dtype} of shape {list(shape)} in numbers of 4 bits"
                continue
            shape = (*shape[:-1], shape[-1] // 2)
        if math.prod(shape) * DTYPES[dtype].itemsize != stop - start:
            raise FormatError(
                f"{file_range.label}: {name[:200]!r} has {stop - start} bytes, which do not "
                f"match its shape {list(entry.shape)} and dtype {dtype}: copy the file again"
            )
        arrays[name] = StoredArray.contiguous(file_range.name, data.offset + start, dtype, shape)
    if previous_end != data.size:
        raise FormatError(
            f"{file_range.label}: {data.size - previous_end} bytes follow the last array: copy the "
            "file again"
        )
    arrays_in_order = {name: arrays[name] for name in entries if name in arrays}
    return Header(arrays_in_order, metadata, left_out)


def _decode_header(
    file_range: FileRange, header_bytes: bytes
) -> tuple[dict[str, _ArrayEntry], dict[str, str]]:
    try:
        header: Any = msgspec.json.decode(header_bytes, type=dict[str, Any])
        metadata = msgspec.convert(header.pop(METADATA, {}), dict[str, str])
        return msgspec.convert(header, dict[str, _ArrayEntry]), metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{file_range.label}: the header is malformed: {error}: copy the file again"
        ) from error
