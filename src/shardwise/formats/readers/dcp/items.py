"""Finds where tensors start in DCP's data files, and reads the pickled values from these files.

A data file consists of items. Each item is a file of torch.save: a zip archive with a pickle,
followed by the array of a tensor. Only the head of an item is parsed, not its zip directory. The
heads of tensors of the same shape are equal, and equal heads are parsed once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_errors import UnknownClassError
from shardwise.formats.containers.pickle_values import UnknownObject
from shardwise.formats.containers.pickles import unpickle
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import parse_storage_id, read_torch_file
from shardwise.formats.containers.torch_values import TORCH_NAMES, Storage
from shardwise.formats.file_tree import BytesFile, FileTree
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.dcp.metadata import Item
from shardwise.store import ReadableFile

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_BYTES = 16
_FIRST_STORAGE = "0"
_HEAD_SIZE = 1024
"""The number of bytes of an item that are read first."""
_LARGEST_HEAD = 2**20
_LARGEST_GAP = 2**15
"""The largest gap, in bytes, between items that are read in one request."""
_LARGEST_WINDOW = 2**22
_THREADS = 16


Found: TypeAlias = StoredArray | UnknownObject
"""The array of an item, or its class if it is a tensor of an unknown class."""


def find_arrays(
    tree: FileTree, names: Sequence[str], items: Sequence[Item], offsets: object = None
) -> list[Found]:
    """Read the head (the first bytes) of each item, and find where the item's array starts.

    Args:
        names: names of the items, for messages.

    Raises:
        FormatError: an item is outside of its file, or is not a tensor saved by torch.save.
        UnknownClassError: an item is a tensor of an unknown class, and is not to be skipped.
    """
    heads = _ParsedHeads(tree.skip_unknown)
    found: dict[int, Found] = {}

    def find_array_of_item(index: int, head: bytes, file: ReadableFile) -> None:
        item, head_size = items[index], len(head)
        array = heads.find_array(head, names[index])
        while array is None and head_size < min(item.length, _LARGEST_HEAD):
            head_size = min(4 * head_size, item.length)
            whole_file = FileRange(file, item.file, item.offset, item.length, names[index])
            array = heads.find_array(whole_file.read(0, head_size), names[index])
        if array is None:
            raise FormatError(
                f"{names[index]}: the bytes that .metadata lists are not a tensor saved by "
                "torch.save: copy .metadata and all other files from one save"
            )
        found[index] = array if isinstance(array, UnknownObject) else item.place(array)

    _read_items(tree, names, items, _HEAD_SIZE, find_array_of_item)
    return [found[index] for index in range(len(items))]


def read_values(
    tree: FileTree,
    names: Sequence[str],
    items: Sequence[Item],
) -> list[Any]:
    """Read the values of pickled items, with `StoredArray` for tensors in them.

    Args:
        names: names of the items, for messages.

    Raises:
        FormatError: an item is malformed, or contains objects that are not read from pickles.
    """
    values: list[Any] = [None] * len(items)
    value_by_data: dict[bytes, Any] = {}

    def read_value_of_item(index: int, data: bytes, file: ReadableFile) -> None:
        item = items[index]
        if data in value_by_data:
            values[index] = value_by_data[data]
            return
        source: ReadableFile = BytesFile(data, item.offset) if len(data) == item.length else file
        item_range = FileRange(source, item.file, item.offset, item.length, names[index])
        values[index] = read_torch_file(item_range, skip_unknown=tree.skip_unknown).value
        if b"/data/" not in data and len(data) == item.length:
            value_by_data[data] = values[index]

    _read_items(tree, names, items, _LARGEST_WINDOW, read_value_of_item)
    return values


class _ParsedHeads:
    """The heads of items that were parsed so far. Many items have equal heads."""

    def __init__(self, skip_unknown: bool) -> None:
        self._skip_unknown = skip_unknown
        self._array_by_head: dict[bytes, StoredArray] = {}
        self._head_lengths: tuple[int, ...] = ()

    def find_array(self, head: bytes, name: str) -> Found | None:
        """Return the array, as if the item began at offset 0 of a file.

        Return None if the head is incomplete, and an `UnknownObject` for an unknown class.
        """
        for length in self._head_lengths:
            found = self._array_by_head.get(head[:length])
            if found is not None:
                return found
        parsed = _parse_head(head, name, self._skip_unknown)
        if not isinstance(parsed, tuple):
            return parsed
        array, storage_start = parsed
        found = replace(array, start=storage_start + array.start)
        self._array_by_head[head[:storage_start]] = found
        self._head_lengths = tuple({*self._head_lengths, storage_start})
        return found


def _parse_head(
    head: bytes, name: str, skip_unknown: bool
) -> tuple[StoredArray, int] | UnknownObject | None:
    """Return the array, and the offset of its storage in the item; None if bytes are missing."""
    pickle = None
    for record_name, start, data in _read_records(head, name):
        if record_name.endswith("/data.pkl"):
            pickle = data
        elif record_name.endswith("/byteorder") and data not in (b"little", None):
            raise FormatError(
                f"{name}: a big-endian machine wrote this tensor, which is not supported: load it "
                "with torch, and save it on a little-endian machine"
            )
        elif record_name.endswith("/data/0") and pickle is not None:
            stored = read_pickled_tensor(pickle, name, skip_unknown)
            if stored is None:
                raise FormatError(
                    f"{name}: the bytes that .metadata lists hold no plain tensor: copy .metadata "
                    "and all other files from one save"
                )
            return stored if isinstance(stored, UnknownObject) else (stored, start)
    return None


def read_pickled_tensor(
    pickle: bytes, source: str, skip_unknown: bool
) -> StoredArray | UnknownObject | None:
    """Return the array of a pickled tensor, as if its only storage began at offset 0 of a file.

    Return an `UnknownObject` for a tensor of an unknown class, and None for any other value.

    Args:
        source, skip_unknown: see `unpickle`.
    """
    value = unpickle(
        pickle,
        source,
        also_allowed=TORCH_NAMES,
        persistent_load=_load_storage,
        skip_unknown=skip_unknown,
    ).value
    if isinstance(value, UnknownObject):
        return value
    return value if isinstance(value, StoredArray) and value.file == _FIRST_STORAGE else None


def _load_storage(persistent_id: object) -> object:
    # Tensors of other classes may have several storages.
    storage_type, key, numel = parse_storage_id(persistent_id)
    if isinstance(storage_type, UnknownObject):
        return storage_type
    return Storage(key, 0, numel * storage_type.itemsize, storage_type.dtype)


def _read_records(head: bytes, name: str) -> Iterator[tuple[str, int, bytes | None]]:
    """Yield the name, start and bytes of each record of an archive. Incomplete bytes are None."""
    position = 0
    while position + _LOCAL_HEADER.size <= len(head):
        fields = _LOCAL_HEADER.unpack_from(head, position)
        signature, flags, method, size, name_size, extra_size = (
            fields[i] for i in (0, 2, 3, 8, 9, 10)
        )
        if signature != b"PK\x03\x04" or method or flags & 1:
            raise FormatError(
                f"{name}: the bytes that .metadata lists are not a file of torch.save: copy "
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


def _read_items(
    tree: FileTree,
    names: Sequence[str],
    items: Sequence[Item],
    max_bytes: int,
    handle_item: Callable[[int, bytes, ReadableFile], None],
) -> None:
    """Read the first bytes of each item, and pass them to `handle_item`. Read files in parallel.

    Args:
        max_bytes: the largest number of bytes to read of each item.
        handle_item: a function of the index of an item, its first bytes, and the open file.
    """
    order = sorted(range(len(items)), key=lambda i: (items[i].file, items[i].offset))

    def read_file(group: tuple[str, list[int]]) -> None:
        file = tree.open(group[0])
        try:
            for indices in _group_into_windows(items, group[1], max_bytes):
                window_start = items[indices[0]].offset
                window_stop = max(
                    items[i].offset + min(items[i].length, max_bytes) for i in indices
                )
                data = FileRange.whole_file(file, group[0], tree.label(group[0])).read(
                    window_start, window_stop - window_start
                )
                for index in indices:
                    item, position = items[index], items[index].offset - window_start
                    if item.length > file.size - item.offset:
                        raise FormatError(
                            f"{tree.label(item.file)}: {names[index]} should be at bytes "
                            f"[{item.offset}, {item.offset + item.length}), but the file has only "
                            f"{file.size} bytes: it was truncated; copy it again from an intact "
                            "source"
                        )
                    try:
                        handle_item(
                            index, data[position : position + min(item.length, max_bytes)], file
                        )
                    except UnknownClassError as error:
                        label = tree.label(item.file)
                        raise UnknownClassError(f"{label}: {error}", error.names) from error
                    except FormatError as error:
                        raise FormatError(f"{tree.label(item.file)}: {error}") from error
        finally:
            file.close()

    groups = [(name, list(group)) for name, group in groupby(order, key=lambda i: items[i].file)]
    with ThreadPoolExecutor(min(max(_THREADS, tree.threads), max(1, len(groups)))) as pool:
        for _ in pool.map(read_file, groups):
            pass


def _group_into_windows(
    items: Sequence[Item], order: Sequence[int], max_bytes: int
) -> Iterator[list[int]]:
    """Group adjacent items of a file, to read each group in one request."""
    window: list[int] = []
    window_start = window_stop = 0
    for index in order:
        start, stop = items[index].offset, items[index].offset + min(items[index].length, max_bytes)
        if window and (start - window_stop > _LARGEST_GAP or stop - window_start > _LARGEST_WINDOW):
            yield window
            window = []
        if not window:
            window_start = window_stop = start
        window.append(index)
        window_stop = max(window_stop, stop)
    if window:
        yield window
