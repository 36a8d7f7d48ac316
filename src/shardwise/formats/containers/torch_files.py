"""Files of torch.save: zip archives, and the format before torch 1.6. No tensor is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_opcodes import CutOffError
from shardwise.formats.containers.pickle_values import Opaque, Record, Stubs
from shardwise.formats.containers.pickles import Pickled, unpickle
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_values import (
    RESOLVE,
    TORCH,
    UNRESOLVED,
    Storage,
    StorageType,
    Unresolved,
    UnresolvedError,
)
from shardwise.formats.containers.zip_archive import START, Entry, read_directory

_PICKLE = "/data.pkl"
LARGEST_PICKLE = 2**31
MOST_NAMED = 4
"""The most names that a message lists."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The value passed to torch.save, with `StoredArray` for tensors and `Storage` for storages.

    Attributes:
        value: the value. Tensors that share memory have equal `StoredArray`s.
        opaque: names of the classes that were left out.
        file: the file number in the arrays; another file's if the value is from a `ParseCache`.
    """

    value: Any
    opaque: tuple[str, ...]
    file: int


class ParseCache:
    """A cache of parsed files. Ranks write many files with the same pickle and the same places.

    All files must be read with the same stubs.
    """

    def __init__(self) -> None:
        self._parsed: dict[bytes, list[tuple[Mapping[str, Entry], Contents]]] = {}
        self._lock = Lock()

    def find(
        self, text: bytes, places: Mapping[str, Entry], parse: Callable[[], Contents]
    ) -> Contents:
        """Return the contents of a pickle with storages at these places; parse it if needed."""
        with self._lock:  # only one of several threads parses the same pickle
            known = self._parsed.setdefault(text, [])
            for others, contents in known:
                if others == places:
                    return contents
            known.append((places, parse()))
            return known[-1][1]


def is_torch_file(head: bytes) -> bool:
    """Whether a file with these first bytes may be a file of torch.save."""
    return head.startswith(START) or is_legacy(head)


def read_torch_file(
    part: FileRange,
    *,
    stubs: Stubs | None = None,
    opaque: bool = False,
    cache: ParseCache | None = None,
) -> Contents:
    """Read the value in a file of torch.save, or in a range of a file. No tensor is read.

    Args:
        part: the file or range.
        stubs, opaque: see `unpickle`.
        cache: files that were parsed before.

    Raises:
        FormatError: the file is not of torch.save, is malformed or cut off, was written on a
            big-endian machine, or contains objects that are not read from pickles.
    """
    table = {**TORCH, **(stubs or {})}
    try:
        return _read(part, table, opaque, cache)
    except UnresolvedError as error:
        found = _read(part, {**table, **UNRESOLVED}, True, None).value
        names = [name for name in _unresolved(found, "") if name]
        if not names:
            raise
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        said = f"{', '.join(names[:MOST_NAMED])}{more}: {RESOLVE}"
        raise FormatError(f"{part.where}: {said}") from error


def _read(part: FileRange, table: Stubs, opaque: bool, cache: ParseCache | None) -> Contents:
    head = part.read(0, min(64, part.size))
    if head.startswith(START):
        return _read_zip(part, table, opaque, cache)
    if is_legacy(head):
        return Contents(*read_legacy(part, table, opaque), part.number)
    raise FormatError(f"{part.where}: not a file of torch.save")


def _unresolved(value: object, name: str) -> Iterator[str]:
    """Yield the names of tensors that cannot be read."""
    if isinstance(value, Unresolved):
        yield name
    items: Mapping[Any, object] = {}
    if isinstance(value, dict):
        items = value
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif isinstance(value, Record):
        items = value.fields
    for key, each in items.items():
        yield from _unresolved(each, f"{name}.{key}" if name else str(key))


def pickle_text(part: FileRange) -> bytes:
    """Return the pickle in a zip archive of torch.save.

    Raises:
        FormatError: the file is not such an archive, or is malformed.
    """
    return _pickle_of(part, read_directory(part))[1]


def _pickle_of(part: FileRange, entries: Mapping[str, Entry]) -> tuple[str, bytes]:
    """Return the folder of all entries, and the pickle."""
    names = [name for name in entries if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(names) != 1:
        raise FormatError(f"{part.where}: a zip archive without data.pkl, so not of torch.save")
    data = entries[names[0]]
    if data.size > LARGEST_PICKLE:
        raise FormatError(
            f"{part.where}: its pickle has {data.size} bytes; at most 2^31 are supported"
        )
    return names[0].removesuffix(_PICKLE), part.read(data.start, data.size)


def _read_zip(part: FileRange, stubs: Stubs, opaque: bool, cache: ParseCache | None) -> Contents:
    entries = read_directory(part)
    folder, text = _pickle_of(part, entries)
    order = entries.get(f"{folder}/byteorder")
    if order is not None and part.read(order.start, min(order.size, 16)) != b"little":
        raise FormatError(
            f"{part.where}: it was written on a big-endian machine, which is not supported"
        )
    prefix = f"{folder}/data/"
    places = {n.removeprefix(prefix): e for n, e in entries.items() if n.startswith(prefix)}
    parse = partial(_parse, part, text, places, stubs, opaque)
    return parse() if cache is None or part.offset else cache.find(text, places, parse)


def _parse(
    part: FileRange, text: bytes, places: Mapping[str, Entry], stubs: Stubs, opaque: bool
) -> Contents:
    def storage(found: object) -> object:
        kind, key, numel = storage_fields(found)
        if isinstance(kind, Opaque):
            return kind
        entry = places.get(key)
        if entry is None:
            raise ValueError(f"storage {key[:40]!r} is missing")
        if numel * kind.itemsize > entry.size:
            raise ValueError(f"storage {key[:40]!r} is shorter than the pickle says")
        return Storage(part.number, part.offset + entry.start, numel * kind.itemsize, kind.dtype)

    read = unpickle(text, part.where, stubs=stubs, persistent=storage, opaque=opaque)
    return Contents(read.value, read.opaque, part.number)


def storage_fields(found: object) -> tuple[Any, str, int]:
    """Return the type, the key and the number of elements in the persistent id of a storage.

    Raises:
        ValueError: it is not such an id.
    """
    if not isinstance(found, tuple) or len(found) != 5 or found[0] != "storage":
        raise ValueError("it refers to something that is not a storage")
    _, kind, key, _, numel = found
    if not isinstance(kind, (StorageType, Opaque)) or type(key) is not str:
        raise ValueError("it refers to a storage without a type or key")
    if type(numel) is not int or not 0 <= numel < 2**62:
        raise ValueError("it refers to a storage without a size")
    return kind, key, numel


MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_HEADS = [pickle.dumps(MAGIC, protocol) for protocol in range(2, 6)]
_FIRST_READ = 2**20


def is_legacy(head: bytes) -> bool:
    """Whether a file with these first bytes was written before torch 1.6."""
    return any(head.startswith(each.rstrip(b".")) for each in _HEADS)


def read_legacy(part: FileRange, stubs: Stubs, opaque: bool) -> tuple[Any, tuple[str, ...]]:
    """Read a file from before torch 1.6; return its value and the names not on the list.

    Raises:
        FormatError: the file is malformed.
    """
    most = min(part.size, LARGEST_PICKLE)
    size = min(_FIRST_READ, most)
    while size < most:  # the pickles are at the start; their size is unknown
        with suppress(CutOffError):
            return _read_pickles(part, part.read(0, size), stubs, opaque)
        size = min(8 * size, most)
    return _read_pickles(part, part.read(0, size), stubs, opaque)


@dataclass(slots=True)
class _Storages:
    """Storages by key. Their starts are 0 until they are known, which is after the pickles."""

    file: int
    types: dict[str, StorageType] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def __call__(self, found: object) -> object:
        """Return the storage, or the part of one, with this persistent id."""
        if not isinstance(found, tuple) or len(found) != 6 or found[0] != "storage":
            raise ValueError("it refers to something that is not a storage")
        _, kind, key, _, count, view = found
        if isinstance(kind, Opaque):
            return kind
        if not isinstance(kind, StorageType) or type(key) is not str:
            raise ValueError("it refers to a storage without a type or key")
        self.types.setdefault(key, kind)
        self.counts.setdefault(key, count)
        if (self.types[key], self.counts[key]) != (kind, count):
            raise ValueError(f"it has two different storages {key[:40]!r}")
        first, numel = (0, count) if view is None else view[1:]
        if not all(type(n) is int and 0 <= n < 2**62 for n in (count, first, numel)):
            raise ValueError("it refers to a storage without a size")
        if first + numel > count:
            raise ValueError("it refers to a range outside of a storage")
        start = self.starts.get(key, 0) + first * kind.itemsize
        return Storage(self.file, start, numel * kind.itemsize, kind.dtype)


def _read_pickles(
    part: FileRange, data: bytes, stubs: Stubs, opaque: bool
) -> tuple[Any, tuple[str, ...]]:
    pickles = _in_turn(data, part.where)
    if next(pickles).value != MAGIC or next(pickles).value != PROTOCOL:
        raise FormatError(f"{part.where}: a file of an unknown version of torch.save")
    system = next(pickles)
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise FormatError(
            f"{part.where}: it was written on a big-endian machine, which is not supported"
        )
    storages = _Storages(part.number)

    def read_values() -> Pickled:
        return unpickle(
            data, part.where, stubs=stubs, persistent=storages, opaque=opaque, start=system.end
        )

    keys = unpickle(data, part.where, start=read_values().end)
    _locate(part, storages, keys.value, keys.end)
    read = read_values()  # once more, now that the starts of storages are known
    return read.value, read.opaque


def _in_turn(data: bytes, where: str) -> Iterator[Pickled]:
    at = 0
    while True:
        read = unpickle(data, where, start=at)
        at = read.end
        yield read


def _locate(part: FileRange, storages: _Storages, keys: object, at: int) -> None:
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages.types):
        raise FormatError(f"{part.where}: its list of storages does not match its tensors")
    for key in keys:
        count = int.from_bytes(part.read(at, 8), "little")
        if count != storages.counts[key]:
            raise FormatError(
                f"{part.where}: storage {key[:40]!r} has not the size that the pickle says"
            )
        size = count * storages.types[key].itemsize
        part.within(at + 8, size, f"storage {key[:40]!r}")
        storages.starts[key] = part.offset + at + 8
        at += 8 + size
