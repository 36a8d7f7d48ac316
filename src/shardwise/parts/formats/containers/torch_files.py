"""Reads files of torch.save: zip archives, and the format before torch 1.6. Reads no tensor."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any

import torch

from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.containers.pickle_values import (
    AllowedNames,
    TruncatedError,
    UnknownObject,
)
from shardwise.parts.formats.containers.pickles import unpickle
from shardwise.parts.formats.containers.ranges import FileRange
from shardwise.parts.formats.containers.torch_values import TORCH_NAMES, name_of_dtype
from shardwise.parts.formats.containers.zip_archive import ZIP_START, read_directory
from shardwise.parts.formats.foreign import StoredArray, StoredComposite

_PICKLE = "/data.pkl"
LARGEST_PICKLE = 2**31
MOST_NAMES_SHOWN = 4
"""The most names that a message lists."""


class ParseCache:
    """A cache of parsed files. Ranks write many files with equal pickles and equal offsets.

    All files must be read with the same allowed names.
    """

    def __init__(self) -> None:
        self._parsed: dict[Hashable, Any] = {}
        self._lock = Lock()

    def find(self, key: Hashable, parse: Callable[[], Any]) -> Any:
        """Return the value of a file, from the cache or by `parse`.

        Args:
            key: the pickle, and the key, offset and size of each storage.
        """
        with self._lock:  # so that several threads do not parse the same pickle
            if key not in self._parsed:
                self._parsed[key] = parse()
            return self._parsed[key]


def is_torch_file(head: bytes) -> bool:
    """Return whether a file that begins with these bytes may be a file of torch.save."""
    return head.startswith(ZIP_START) or is_legacy(head)


def read_torch_file(
    file_range: FileRange,
    *,
    also_allowed: AllowedNames | None = None,
    skip_unknown: bool = False,
    cache: ParseCache | None = None,
) -> Any:
    """Return the value in a file of torch.save, or in a range of a file. No tensor is read.

    Tensors and storages become `StoredArray`s, which are equal if the tensors share memory. The
    parts of DTensors and ShardedTensors become `StoredPart`s.

    Args:
        file_range: the file or range.
        also_allowed: names that are allowed in addition to `TORCH_NAMES`; see `unpickle`.
        skip_unknown: see `unpickle`.
        cache: files that were parsed before. If a file in the cache has the same pickle, the value
            of that file is returned. The arrays in the value name that file.

    Raises:
        FormatError: the file is not a file of torch.save, is malformed or truncated, was written on
            a big-endian machine, or contains objects that are not in `also_allowed`.
    """
    allowed = {**TORCH_NAMES, **(also_allowed or {})}
    head = file_range.read(0, min(64, file_range.size))
    if head.startswith(ZIP_START):
        return _read_zip(file_range, allowed, skip_unknown, cache)
    if is_legacy(head):
        return read_legacy(file_range, allowed, skip_unknown)
    raise FormatError(
        f"{file_range.label}: not a file of torch.save, or damaged: copy the file again from an "
        "intact source"
    )


def read_pickle_bytes(file_range: FileRange) -> bytes:
    """Return the pickle in a zip archive of torch.save.

    Raises:
        FormatError: the file is not such an archive, or is malformed.
    """
    return _read_pickle_entry(file_range, read_directory(file_range))[1]


def _read_pickle_entry(
    file_range: FileRange, entries: Mapping[str, tuple[int, int]]
) -> tuple[str, bytes]:
    """Return the folder in the archive, and the pickle."""
    names = [name for name in entries if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(names) != 1:
        contents = f"with {len(names)} files" if names else "without"
        raise FormatError(
            f"{file_range.label}: not a file of torch.save: a zip archive {contents} data.pkl; "
            "pass a file of torch.save, or copy the file again if torch.save wrote it"
        )
    offset, size = entries[names[0]]
    if size > LARGEST_PICKLE:
        raise FormatError(
            f"{file_range.label}: its pickle has {size} bytes; at most {LARGEST_PICKLE} are "
            "supported: save large values as tensors"
        )
    return names[0].removesuffix(_PICKLE), file_range.read(offset, size)


def _read_zip(
    file_range: FileRange, allowed: AllowedNames, skip_unknown: bool, cache: ParseCache | None
) -> Any:
    entries = read_directory(file_range)
    folder, pickle_bytes = _read_pickle_entry(file_range, entries)
    byteorder = entries.get(f"{folder}/byteorder")
    if byteorder and file_range.read(byteorder[0], min(byteorder[1], 16)) != b"little":
        raise FormatError(
            f"{file_range.label}: written on a big-endian machine, which is not supported: load it "
            "with torch and save it again on a little-endian machine"
        )
    prefix = f"{folder}/data/"
    storages = {
        name.removeprefix(prefix): entry
        for name, entry in entries.items()
        if name.startswith(prefix)
    }

    def load_storage(persistent_id: object) -> object:
        dtype, key, count = _parse_storage_id(persistent_id)
        if isinstance(dtype, UnknownObject):
            return dtype
        if key not in storages:
            raise ValueError(f"it refers to the storage {key[:40]!r}, which the file lacks")
        (start, stored_size), size = storages[key], count * dtype.itemsize
        if size > stored_size:
            raise ValueError(
                f"it needs {size} bytes of the storage {key[:40]!r}, which has {stored_size}"
            )
        return _make_storage(file_range.name, file_range.offset + start, dtype, count)

    def parse() -> Any:
        return unpickle(
            pickle_bytes,
            file_range.label,
            also_allowed=allowed,
            persistent_load=load_storage,
            skip_unknown=skip_unknown,
        )[0]

    if cache is None or file_range.offset:
        return parse()
    return cache.find((pickle_bytes, *storages.items()), parse)


def _make_storage(file: str, start: int, dtype: torch.dtype, count: int) -> StoredArray:
    return StoredArray(file, start, name_of_dtype(dtype), (count,), (1,))


def _parse_storage_id(persistent_id: object, length: int = 5) -> tuple[Any, ...]:
    """Return the dtype, the key and the number of elements in the persistent id of a storage.

    If `length` is more than 5, the further items of the persistent id follow.

    Raises:
        ValueError: this is not the persistent id of a storage.
    """
    if (
        not isinstance(persistent_id, tuple)
        or len(persistent_id) != length
        or persistent_id[0] != "storage"
    ):
        raise ValueError("a persistent id is not that of a storage")
    _, dtype, key, _, count, *rest = persistent_id
    if not isinstance(dtype, (torch.dtype, UnknownObject)) or type(key) is not str:
        raise ValueError("the persistent id of a storage has no type or key")
    if type(count) is not int or not 0 <= count < 2**62:
        raise ValueError("the persistent id of a storage has an invalid size")
    return dtype, key, count, *rest


def unpickle_tensor(
    data: bytes, source: str, *, skip_unknown: bool = False
) -> StoredArray | StoredComposite | UnknownObject | None:
    """Return the array of a pickled tensor, as if its only storage began at offset 0 of a file.

    Return a tensor that wraps others with offsets that mean nothing, because it has several
    storages; an `UnknownObject` for a tensor of an unknown class; and None for any other value.

    Args:
        data: the pickle, without the storage.
        source, skip_unknown: see `unpickle`.
    """

    def load_storage(persistent_id: object) -> object:
        # Tensors of other classes may have several storages.
        dtype, key, count = _parse_storage_id(persistent_id)
        return dtype if isinstance(dtype, UnknownObject) else _make_storage(key, 0, dtype, count)

    value, _ = unpickle(
        data,
        source,
        also_allowed=TORCH_NAMES,
        persistent_load=load_storage,
        skip_unknown=skip_unknown,
    )
    if isinstance(value, (UnknownObject, StoredComposite)):
        return value
    if isinstance(value, StoredArray) and value.file == "0":
        return value
    return None


LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
LEGACY_STARTS = [pickle.dumps(LEGACY_MAGIC, protocol) for protocol in range(2, 6)]
_FIRST_READ_SIZE = 2**20


def is_legacy(head: bytes) -> bool:
    """Return whether a file that begins with these bytes has the format before torch 1.6."""
    return any(head.startswith(item.rstrip(b".")) for item in LEGACY_STARTS)


def read_legacy(file_range: FileRange, allowed: AllowedNames, skip_unknown: bool) -> Any:
    """Return the value in a file in the format before torch 1.6.

    Raises:
        FormatError: the file is malformed.
    """
    max_size = min(file_range.size, LARGEST_PICKLE)
    size = min(_FIRST_READ_SIZE, max_size)
    while size < max_size:  # the pickles are at the start; their size is unknown
        with suppress(TruncatedError):
            return _parse_legacy(file_range, file_range.read(0, size), allowed, skip_unknown)
        size = min(8 * size, max_size)
    return _parse_legacy(file_range, file_range.read(0, size), allowed, skip_unknown)


def _parse_legacy(
    file_range: FileRange, data: bytes, allowed: AllowedNames, skip_unknown: bool
) -> Any:
    pickles = _read_pickles_in_order(data, file_range.label)
    if next(pickles)[0] != LEGACY_MAGIC or next(pickles)[0] != LEGACY_PROTOCOL:
        raise FormatError(
            f"{file_range.label}: written by an unknown version of torch.save: load it with torch, "
            "and save it again"
        )
    system_info, start = next(pickles)
    if not isinstance(system_info, dict) or system_info.get("little_endian") is not True:
        raise FormatError(
            f"{file_range.label}: written on a big-endian machine, which is not supported: load it "
            "with torch and save it again on a little-endian machine"
        )
    # Storages by key. All starts are 0 until the end of the pickles is known.
    storages: dict[str, StoredArray] = {}

    def load_storage(persistent_id: object) -> object:
        dtype, key, count, view = _parse_storage_id(persistent_id, 6)
        if isinstance(dtype, UnknownObject):
            return dtype
        new = _make_storage(file_range.name, 0, dtype, count)
        storage = storages.setdefault(key, new)
        if (storage.dtype, storage.shape) != (new.dtype, new.shape):
            raise ValueError(f"storage {key[:40]!r} has two types or sizes")
        first, length = (0, count) if view is None else view[1:]
        if not all(type(n) is int and 0 <= n < 2**62 for n in (first, length)):
            raise ValueError("the persistent id of a storage has an invalid size")
        if first + length > count:
            raise ValueError(f"a part of storage {key[:40]!r} is outside of the storage")
        return storage.part((first,), (length,))

    def read_values() -> tuple[Any, int]:
        return unpickle(
            data,
            file_range.label,
            also_allowed=allowed,
            persistent_load=load_storage,
            skip_unknown=skip_unknown,
            start=start,
        )

    _, end = read_values()
    _locate_storages(file_range, storages, *unpickle(data, file_range.label, start=end))
    return read_values()[0]  # again, because the starts of storages are known now


def _read_pickles_in_order(data: bytes, source: str) -> Iterator[tuple[Any, int]]:
    position = 0
    while True:
        value, position = unpickle(data, source, start=position)
        yield value, position


def _locate_storages(
    file_range: FileRange, storages: dict[str, StoredArray], storage_keys: Any, position: int
) -> None:
    is_list = isinstance(storage_keys, list) and all(type(key) is str for key in storage_keys)
    if not is_list or sorted(storage_keys) != sorted(storages):
        raise FormatError(
            f"{file_range.label}: the list of storages does not match the tensors: copy the file "
            "again"
        )
    for key in storage_keys:
        element_count = int.from_bytes(file_range.read(position, 8), "little")
        (expected,) = storages[key].shape
        if element_count != expected:
            raise FormatError(
                f"{file_range.label}: storage {key[:40]!r} has {element_count} elements, but the "
                f"pickle needs {expected}: copy the file again"
            )
        size = element_count * storages[key].itemsize
        content = file_range.subrange(position + 8, size, f"storage {key[:40]!r}")
        storages[key] = replace(storages[key], start=content.offset)
        position += 8 + size
