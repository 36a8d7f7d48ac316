"""Finds where tensors start in DCP's data files, and reads the pickled values from these files.

A data file consists of items. Each item is a file of torch.save: a zip archive with a pickle,
followed by the array of a tensor. Only the head of an item is parsed, not its zip directory. The
heads of tensors of the same shape are equal, and equal heads are parsed once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from shardwise.parts.formats.reader import (
    Box,
    FilePart,
    FileRange,
    FileTree,
    FormatError,
    StoredArray,
    StoredComposite,
    UnknownObject,
)
from shardwise.parts.formats.readers.dcp.metadata import Metadata, item_key, parse_index

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_BYTES = 16
_HEAD_SIZE = 1024
"""The number of bytes of an item that are read first."""
_LARGEST_HEAD = 2**20
_LARGEST_VALUE_KEPT = 2**22


ItemArray: TypeAlias = StoredArray | StoredComposite | UnknownObject
"""The array of an item, or its class if it is a tensor of an unknown class."""


def find_arrays(tree: FileTree, items: Sequence[FilePart]) -> list[ItemArray]:
    """Read the head (the first bytes) of each item, and find where the item's array starts.

    Raises:
        FormatError: an item is outside of its file, or is not a tensor saved by torch.save.
        UnknownClassError: an item is a tensor of an unknown class, and is not to be skipped.
    """
    heads = _ParsedHeads(tree)

    def find_array(index: int, item: FileRange) -> ItemArray:
        size, found = 0, None
        while found is None and size < min(item.size, _LARGEST_HEAD):
            size = min(4 * size or _HEAD_SIZE, item.size)
            found = heads.find_array(item.read(0, size), item.label)
        if found is None:
            raise FormatError(
                f"{item.label}: the bytes that .metadata lists are not a tensor saved by "
                "torch.save: copy .metadata and all other files from one save"
            )
        if isinstance(found, StoredComposite):  # the head lacks most of its storages
            found = tree.load_range(item)
            if not isinstance(found, StoredComposite):
                raise FormatError(f"{item.label}: the pickle changed: copy the file again")
            return found
        return place(found, items[index])

    return tree.read_parts(items, find_array, _HEAD_SIZE)


def read_described_arrays(
    tree: FileTree,
    metadata: Metadata,
    chunks: Sequence[tuple[str, Box]],
    items: Sequence[FilePart],
    path: str,
) -> list[ItemArray] | None:
    """Return the arrays of items, if these are raw bytes, as in ByteCheckpoint; otherwise None.

    ByteCheckpoint describes the bytes by a pickle for each chunk, which its metadata contains.

    Args:
        chunks: for each item, the name of the tensor, and the chunk.
        path: the path of the metadata, for messages.

    Raises:
        FormatError: the description of a chunk is missing or malformed.
    """
    pickles = metadata.extra_fields.get("all_tensor_metadata")
    if not isinstance(pickles, dict):
        return None
    try:
        data_by_key = {item_key(*parse_index(index)): data for index, data in pickles.items()}
    except FormatError as error:
        raise FormatError(f"{path}: all_tensor_metadata: {error}") from error
    parsed: dict[bytes, ItemArray] = {}
    arrays = []
    for (name, chunk), item in zip(chunks, items, strict=True):
        data = data_by_key.get(item_key(name, chunk.offset))
        if not isinstance(data, bytes):
            raise FormatError(
                f"{path}: {name}: all_tensor_metadata lacks the dtype and strides of the chunk at "
                f"{list(chunk.offset)}: copy all files of one save"
            )
        if data not in parsed:
            label = f"{path}: {name}"
            array = tree.unpickle_tensor(data, label)
            if array is None or isinstance(array, StoredComposite):
                raise FormatError(
                    f"{label}: all_tensor_metadata does not describe this tensor by a plain "
                    "tensor: copy the file again from an intact source; if it is intact, load the "
                    "checkpoint with the ByteCheckpoint that wrote it, and save it with torch"
                )
            parsed[data] = array
        arrays.append(place(parsed[data], item))
    return arrays


def place(found: ItemArray, item: FilePart) -> ItemArray:
    """Return an array of an item as an array of the file: `start` then counts from the file's
    start."""
    if not isinstance(found, StoredArray):
        return found
    start = item.offset + found.start
    return StoredArray(item.file, start, found.dtype, found.shape, found.stride)


def read_values(tree: FileTree, items: Sequence[FilePart]) -> list[Any]:
    """Read the values of pickled items, with `StoredArray` for tensors in them.

    Raises:
        FormatError: an item is malformed, or contains objects of classes that shardwise does not
            read.
    """
    value_by_data: dict[bytes, Any] = {}

    def read_value(_: int, item: FileRange) -> Any:
        data = item.read(0, min(item.size, _LARGEST_VALUE_KEPT))
        if data in value_by_data:
            return value_by_data[data]
        value = tree.load_range(item)
        if b"/data/" not in data and len(data) == item.size:
            value_by_data[data] = value
        return value

    return tree.read_parts(items, read_value, _LARGEST_VALUE_KEPT)


class _ParsedHeads:
    """The heads of items that were parsed so far. Many items have equal heads."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._array_by_head: dict[bytes, StoredArray] = {}
        self._head_lengths: tuple[int, ...] = ()

    def find_array(self, head: bytes, label: str) -> ItemArray | None:
        """Return the array, as if the item began at offset 0 of a file.

        Return None if the head is incomplete, and an `UnknownObject` for an unknown class. The
        offsets of a tensor that wraps others mean nothing.
        """
        for length in self._head_lengths:
            found = self._array_by_head.get(head[:length])
            if found is not None:
                return found
        parsed = _parse_head(head, label, self._tree)
        if not isinstance(parsed, tuple):
            return parsed
        array, storage_start = parsed
        found = replace(array, start=storage_start + array.start)
        self._array_by_head[head[:storage_start]] = found
        self._head_lengths = tuple({*self._head_lengths, storage_start})
        return found


def _parse_head(
    head: bytes, label: str, tree: FileTree
) -> tuple[StoredArray, int] | StoredComposite | UnknownObject | None:
    """Return the array, and the offset of its storage in the item; None if bytes are missing."""
    pickle = None
    for record_name, start, data in _read_records(head, label):
        if record_name.endswith("/data.pkl"):
            pickle = data
        elif record_name.endswith("/byteorder") and data not in (b"little", None):
            raise FormatError(
                f"{label}: a big-endian machine wrote this tensor, which is not supported: load it "
                "with torch, and save it on a little-endian machine"
            )
        elif record_name.endswith("/data/0") and pickle is not None:
            stored = tree.unpickle_tensor(pickle, label)
            if stored is None:
                raise FormatError(
                    f"{label}: the bytes that .metadata lists hold no plain tensor: copy .metadata "
                    "and all other files from one save"
                )
            return (stored, start) if isinstance(stored, StoredArray) else stored
    return None


def _read_records(head: bytes, label: str) -> Iterator[tuple[str, int, bytes | None]]:
    """Yield the name, start and bytes of each record of an archive. Incomplete bytes are None."""
    position = 0
    while position + _LOCAL_HEADER.size <= len(head):
        fields = _LOCAL_HEADER.unpack_from(head, position)
        signature, flags, method, size, name_size, extra_size = (
            fields[i] for i in (0, 2, 3, 8, 9, 10)
        )
        if signature != b"PK\x03\x04" or method or flags & 1:
            raise FormatError(
                f"{label}: the bytes that .metadata lists are not a file of torch.save: copy "
                ".metadata and all other files from one save"
            )
        record_name = head[
            position + _LOCAL_HEADER.size : position + _LOCAL_HEADER.size + name_size
        ].decode("utf-8", "replace")
        start = position + _LOCAL_HEADER.size + name_size + extra_size
        stop = _find_end_before_descriptor(head, start) if flags & 8 else start + size
        if stop is None or stop > len(head):
            yield record_name, start, None
            return
        yield record_name, start, head[start:stop]
        position = stop + (_DESCRIPTOR_BYTES if flags & 8 else 0)


def _find_end_before_descriptor(head: bytes, start: int) -> int | None:
    """Return the end of a record whose size is in the data descriptor after it.

    Return None if the descriptor is not in `head`.
    """
    position = head.find(_DESCRIPTOR, start)
    while position >= 0 and position + _DESCRIPTOR_BYTES <= len(head):
        if int.from_bytes(head[position + 8 : position + 12], "little") == position - start:
            return position
        position = head.find(_DESCRIPTOR, position + 1)
    return None
