"""The layout of a data file: a safetensors header, the pieces, plain values, and checksums."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shardwise.boxes import Box
from shardwise.manifest.checksums import block_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import VERSION, FileEntry
from shardwise.manifest.names import CHECKSUMS_KEY, OBJECTS_KEY, data_file

ALIGNMENT = 4096
"""Pieces begin at a multiple of this many bytes, and so do reads that bypass the page cache."""
METADATA = "__metadata__"


def encode_header_entries(
    pieces: Iterable[tuple[str, str, tuple[int, ...], Box]],
) -> tuple[bytes, int]:
    """Encode the header's entries for pieces that are stored one after another.

    Args:
        pieces: the name, dtype and global shape of each piece's tensor, and the piece's box.

    Returns:
        The entries as JSON, without the braces around them; and the size of all pieces in bytes.
    """
    entries: dict[str, object] = {}
    start = 0
    for name, dtype, shape, box in pieces:
        dtype_code, stored_shape, nbytes = _storage_of(dtype, box.shape)
        key = name if box.shape == shape else f"{name}{box}"
        while key in entries or key == METADATA:
            key += "'"
        offsets = [start, start + nbytes]
        entries[key] = {"dtype": dtype_code, "shape": stored_shape, "data_offsets": offsets}
        start += nbytes
    return _encode_without_braces(entries), start


def lay_out_file(
    save_id: str, rank: int, pieces: tuple[bytes, int], objects_bytes: int = 0
) -> tuple[bytes, FileEntry]:
    """Return the header of a rank's data file, and the file's entry in a manifest.

    Args:
        save_id: the id of the save.
        rank: the rank that writes the file.
        pieces: the result of `encode_header_entries`.
        objects_bytes: the size of the encoded plain values of the rank, in bytes.

    Returns:
        The bytes up to the first piece; and the entry, in which the CRC-32 of the checksums is 0
        until they are known.
    """
    metadata = {"shardwise": str(VERSION), "save_id": save_id, "rank": str(rank)}
    entries, objects_start = pieces
    objects_stop = objects_start + objects_bytes
    parts = [_encode_without_braces({METADATA: metadata}), entries]
    if objects_bytes:
        parts.append(_encode_bytes_entry(OBJECTS_KEY, objects_start, objects_stop))
    # The entry of the checksums contains offsets that depend on the size of the header. So reserve
    # space for an entry with larger offsets, which is at least as long.
    longest_entry = _encode_bytes_entry(CHECKSUMS_KEY, objects_stop, 2 * objects_stop + (1 << 24))
    needed = 8 + len(_join_entries([*parts, longest_entry]))
    data_at = -(-needed // ALIGNMENT) * ALIGNMENT
    checksums_stop = objects_stop + 4 * block_count(data_at + objects_stop)
    checksums_entry = _encode_bytes_entry(CHECKSUMS_KEY, objects_stop, checksums_stop)
    encoded = _join_entries([*parts, checksums_entry])
    padding = data_at - 8 - len(encoded)
    header = (len(encoded) + padding).to_bytes(8, "little") + encoded + b" " * padding
    entry = FileEntry(
        name=data_file(rank, save_id),
        rank=rank,
        size=data_at + checksums_stop,
        data_at=data_at,
        objects_at=data_at + objects_start,
        checksums_at=data_at + objects_stop,
        checksums_crc32=0,
    )
    return header, entry


def _encode_bytes_entry(key: str, start: int, stop: int) -> bytes:
    entry = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
    return _encode_without_braces({key: entry})


def _encode_without_braces(entries: dict[str, object]) -> bytes:
    return msgspec.json.encode(entries)[1:-1]


def _join_entries(parts: list[bytes]) -> bytes:
    return b"{" + b",".join(part for part in parts if part) + b"}"


def _storage_of(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """Return safetensors' dtype code, the shape to store, and the size in bytes."""
    element = DTYPES[dtype]
    nbytes = element.itemsize
    for n in shape:
        nbytes *= n
    if element.safetensors_code is not None:
        return element.safetensors_code, shape, nbytes
    return "U8", (*shape, element.itemsize), nbytes
