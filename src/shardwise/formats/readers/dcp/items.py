"""Items of DCP: where the array of each is, and the values of pickled ones.

An item is a small file of torch.save within a larger file: a zip archive with the pickle first and
the array after it. Only its head is parsed, not its zip directory. The heads of tensors of the same
shape are identical, so each kind of head is parsed once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Stubs
from shardwise.formats.containers.pickles import unpickle
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import read_torch_file, storage_fields
from shardwise.formats.containers.torch_values import TORCH, Storage
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.dcp.metadata import Item
from shardwise.formats.tree import BytesFile, Tree
from shardwise.manifest.table import Int
from shardwise.store import ReadableFile

T = TypeVar("T")

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = b"PK\x07\x08"
_HEAD = 1024
_LARGEST_HEAD = 2**20
_GAP = 2**15
"""Items that are closer to each other than this are read in one request."""
_WINDOW = 2**22
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Arrays:
    """Where arrays are: each is one of `kinds`, with its own file and `start`."""

    kinds: Sequence[StoredArray]
    kind: Int
    start: Int


def find_arrays(tree: Tree, names: Sequence[str], items: Sequence[Item]) -> Arrays:
    """Find where the arrays of items begin, from the heads of the items.

    Args:
        names: names of the items, for messages.

    Raises:
        FormatError: an item is outside of its file, or is not a tensor saved by torch.save.
    """
    heads = _Heads()
    kind, start = np.zeros(len(items), np.int64), np.zeros(len(items), np.int64)

    def find(index: int, head: bytes, file: ReadableFile) -> None:
        item, wanted = items[index], len(head)
        found = heads.find(head, names[index])
        while found is None and wanted < min(item.length, _LARGEST_HEAD):
            wanted = min(4 * wanted, item.length)
            whole = FileRange(file, 0, item.offset, item.length, names[index])
            found = heads.find(whole.read(0, wanted), names[index])
        if found is None:
            raise FormatError(f"{names[index]}: its item is not a tensor saved by torch.save")
        kind[index], at = found
        start[index] = item.offset + at

    _for_each(tree, names, items, _HEAD, find)
    return Arrays(heads.kinds, kind, start)


def read_values(
    tree: Tree,
    names: Sequence[str],
    items: Sequence[Item],
    numbers: Sequence[int],
    stubs: Stubs | None = None,
) -> list[Any]:
    """Read the values of pickled items, with `StoredArray` for tensors in them.

    Args:
        names: names of the items, for messages.
        numbers: the number of each item's file.
        stubs: names that are allowed in pickles, in addition to torch's.

    Raises:
        FormatError: an item is malformed, or contains objects that are not read from pickles.
    """
    values: list[Any] = [None] * len(items)
    seen: dict[bytes, Any] = {}

    def read(index: int, data: bytes, file: ReadableFile) -> None:
        item = items[index]
        if data in seen:
            values[index] = seen[data]
            return
        window: ReadableFile = BytesFile(data, item.offset) if len(data) == item.length else file
        part = FileRange(window, numbers[index], item.offset, item.length, names[index])
        values[index] = read_torch_file(part, stubs=stubs, opaque=tree.opaque).value
        if b"/data/" not in data and len(data) == item.length:
            seen[data] = values[index]

    _for_each(tree, names, items, _WINDOW, read)
    return values


class _Heads:
    """The heads that were parsed so far. Many items share a head."""

    def __init__(self) -> None:
        self.kinds: list[StoredArray] = []
        self._known: dict[bytes, tuple[int, int]] = {}
        self._lengths: tuple[int, ...] = ()

    def find(self, head: bytes, name: str) -> tuple[int, int] | None:
        """Return the array's kind and start; None if the head is incomplete."""
        for length in self._lengths:
            found = self._known.get(head[:length])
            if found is not None:
                return found
        parsed = _parse(head, name)
        if parsed is None:
            return None
        array, data_at = parsed
        self.kinds.append(array)
        found = len(self.kinds) - 1, data_at + array.start
        self._known[head[:data_at]] = found
        self._lengths = tuple({*self._lengths, data_at})
        return found


def _parse(head: bytes, name: str) -> tuple[StoredArray, int] | None:
    """Return the array, with its start in the storage, and the start of the storage."""
    pickle = None
    for record, start, data in _records(head, name):
        if record.endswith("/data.pkl"):
            pickle = data
        elif record.endswith("/byteorder") and data not in (b"little", None):
            raise FormatError(
                f"{name}: it was written on a big-endian machine, which is not supported"
            )
        elif record.endswith("/data/0") and pickle is not None:
            stored = unpickle(pickle, name, stubs=TORCH, persistent=first_storage).value
            if not isinstance(stored, StoredArray):
                raise FormatError(f"{name}: expected a plain tensor, found {type(stored).__name__}")
            return stored, start
    return None


def first_storage(found: object) -> object:
    """Return the only storage of a pickle, as if it began at offset 0.

    Raises:
        ValueError: it is not the id of a storage, or not of the first one.
    """
    kind, key, numel = storage_fields(found)
    if key != "0":
        raise ValueError("it has several storages")
    return Storage(0, 0, numel * kind.itemsize, kind.dtype)


def _records(head: bytes, name: str) -> Iterator[tuple[str, int, bytes | None]]:
    """Yield records of an archive: name, start of the bytes, and the bytes if they are complete."""
    at = 0
    while at + _LOCAL.size <= len(head):
        fields = _LOCAL.unpack_from(head, at)
        signature, flags, method, size, name_size, extra = (fields[i] for i in (0, 2, 3, 8, 9, 10))
        if signature != b"PK\x03\x04" or method or flags & 1:
            raise FormatError(f"{name}: its item is not a file of torch.save")
        record = head[at + _LOCAL.size : at + _LOCAL.size + name_size].decode("utf-8", "replace")
        start = at + _LOCAL.size + name_size + extra
        stop = _described_end(head, start) if flags & 8 else start + size
        if stop is None or stop > len(head):
            yield record, start, None
            return
        yield record, start, head[start:stop]
        at = stop + (16 if flags & 8 else 0)


def _described_end(head: bytes, start: int) -> int | None:
    """Return the end of a record whose size is in the data descriptor after it."""
    at = head.find(_DESCRIPTOR, start)
    while at >= 0 and at + 16 <= len(head):
        if int.from_bytes(head[at + 8 : at + 12], "little") == at - start:
            return at
        at = head.find(_DESCRIPTOR, at + 1)
    return None


def _for_each(
    tree: Tree,
    names: Sequence[str],
    items: Sequence[Item],
    most: int,
    take: Callable[[int, bytes, ReadableFile], None],
) -> None:
    """Read up to `most` bytes of each item and pass them to `take`; files are read in parallel."""
    order = sorted(range(len(items)), key=lambda i: (items[i].file, items[i].offset))

    def in_file(group: tuple[str, list[int]]) -> None:
        file = tree.open(group[0])
        try:
            for indices in _windows(items, group[1], most):
                first = items[indices[0]].offset
                last = max(items[i].offset + min(items[i].length, most) for i in indices)
                data = FileRange.whole(file, 0, f"{tree}/{group[0]}").read(first, last - first)
                for index in indices:
                    item, at = items[index], items[index].offset - first
                    if item.length > file.size - item.offset:
                        raise FormatError(
                            f"{names[index]} reaches beyond the end of {tree}/{item.file}"
                        )
                    take(index, data[at : at + min(item.length, most)], file)
        finally:
            file.close()

    groups = [(name, list(group)) for name, group in groupby(order, key=lambda i: items[i].file)]
    with ThreadPoolExecutor(min(_THREADS, max(1, len(groups)))) as pool:
        for _ in pool.map(in_file, groups):
            pass


def _windows(items: Sequence[Item], order: Sequence[int], most: int) -> Iterator[list[int]]:
    """Group items of a file, in order, that are read in one request."""
    window: list[int] = []
    first = end = 0
    for index in order:
        start, stop = items[index].offset, items[index].offset + min(items[index].length, most)
        if window and (start - end > _GAP or stop - first > _WINDOW):
            yield window
            window = []
        if not window:
            first = end = start
        window.append(index)
        end = max(end, stop)
    if window:
        yield window
