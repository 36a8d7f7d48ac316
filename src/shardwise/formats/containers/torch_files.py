"""Files of torch.save: their values, with places in the file where tensors are."""

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
from shardwise.formats.tree import LARGEST_PICKLE, MOST_NAMED

_PICKLE = "/data.pkl"


@dataclass(frozen=True, slots=True)
class Contents:
    """What torch.save was given: tensors and parameters are `StoredArray`s, storages `Storage`s.

    Tensors that are one have equal `StoredArray`s. `opaque` are names of what was left out. `file`
    is the number that arrays have for their file: of another one, if that was found to be cache.
    """

    value: Any
    opaque: tuple[str, ...]
    file: int


class ParseCache:
    """Files that were parsed, so that one of the same pickle and places is not parsed again.

    Ranks write many such. All must be read with the same stubs.
    """

    def __init__(self) -> None:
        self._parsed: dict[bytes, list[tuple[Mapping[str, Entry], Contents]]] = {}
        self._lock = Lock()

    def find(
        self, text: bytes, places: Mapping[str, Entry], parse: Callable[[], Contents]
    ) -> Contents:
        """The contents of a pickle whose storages are at these places."""
        with self._lock:  # of two threads that have the same, one parses it
            known = self._parsed.setdefault(text, [])
            for others, contents in known:
                if others == places:
                    return contents
            known.append((places, parse()))
            return known[-1][1]


def is_torch_file(head: bytes) -> bool:
    """Whether a file that begins like this may be one of torch.save."""
    return head.startswith(START) or is_legacy(head)


def read_torch_file(
    part: FileRange,
    *,
    stubs: Stubs | None = None,
    opaque: bool = False,
    cache: ParseCache | None = None,
) -> Contents:
    """Read the values of a file of torch.save, or of a part of a file that is like one.

    No byte of a tensor is read. See `unpickle` for the arguments. With `cache`, the value may be
    that of another file, which says so.

    Raises:
        FormatError: it is none, is malformed or cut off, was written by a big-endian machine, or
            holds what is not read from pickles.
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
    raise FormatError(f"{part.where}: this is no file of torch.save")


def _unresolved(value: object, name: str) -> Iterator[str]:
    """The names of tensors that could not be read for what they are."""
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
    """The pickle of a file of torch.save that is a zip archive, as it lies there.

    Raises:
        FormatError: it is none, or malformed.
    """
    return _pickle_of(part, read_directory(part))[1]


def _pickle_of(part: FileRange, entries: Mapping[str, Entry]) -> tuple[str, bytes]:
    """The folder of all entries, and the pickle."""
    names = [name for name in entries if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(names) != 1:
        raise FormatError(f"{part.where}: a zip archive, and not of torch.save: it has no data.pkl")
    data = entries[names[0]]
    if data.size > LARGEST_PICKLE:
        raise FormatError(f"{part.where}: its pickle has {data.size} bytes; at most 2^31 are read")
    return names[0].removesuffix(_PICKLE), part.read(data.start, data.size)


def _read_zip(part: FileRange, stubs: Stubs, opaque: bool, cache: ParseCache | None) -> Contents:
    entries = read_directory(part)
    folder, text = _pickle_of(part, entries)
    order = entries.get(f"{folder}/byteorder")
    if order is not None and part.read(order.start, min(order.size, 16)) != b"little":
        raise FormatError(f"{part.where}: it was written by a big-endian machine: not read here")
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
            raise ValueError(f"there is no storage {key[:40]!r}")
        if numel * kind.itemsize > entry.size:
            raise ValueError(f"storage {key[:40]!r} is shorter than it should be")
        return Storage(part.number, part.offset + entry.start, numel * kind.itemsize, kind.dtype)

    read = unpickle(text, part.where, stubs=stubs, persistent=storage, opaque=opaque)
    return Contents(read.value, read.opaque, part.number)


def storage_fields(found: object) -> tuple[Any, str, int]:
    """What the persistent id of a storage says: its type, its name, its number of elements.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(found, tuple) or len(found) != 5 or found[0] != "storage":
        raise ValueError("it refers to something that is no storage")
    _, kind, key, _, numel = found
    if not isinstance(kind, (StorageType, Opaque)) or type(key) is not str:
        raise ValueError("it refers to a storage of no type, or no name")
    if type(numel) is not int or not 0 <= numel < 2**62:
        raise ValueError("it refers to a storage of no size")
    return kind, key, numel


MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_HEADS = [pickle.dumps(MAGIC, protocol) for protocol in range(2, 6)]
_FIRST_READ = 2**20


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins like this is one."""
    return any(head.startswith(each.rstrip(b".")) for each in _HEADS)


def read_legacy(part: FileRange, stubs: Stubs, opaque: bool) -> tuple[Any, tuple[str, ...]]:
    """The value of such a file, and the names that were not on the list.

    Raises:
        FormatError: it is malformed.
    """
    most = min(part.size, LARGEST_PICKLE)
    size = min(_FIRST_READ, most)
    while size < most:  # the pickles are a small part of it, of unknown size
        with suppress(CutOffError):
            return _read_pickles(part, part.read(0, size), stubs, opaque)
        size = min(8 * size, most)
    return _read_pickles(part, part.read(0, size), stubs, opaque)


@dataclass(slots=True)
class _Storages:
    """Storages by key, in file number `file`; all begin at 0 until it is known where they are."""

    file: int
    types: dict[str, StorageType] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def __call__(self, found: object) -> object:
        """The storage that a pickle refers to, or a part of one."""
        if not isinstance(found, tuple) or len(found) != 6 or found[0] != "storage":
            raise ValueError("it refers to something that is no storage")
        _, kind, key, _, count, view = found
        if isinstance(kind, Opaque):
            return kind
        if not isinstance(kind, StorageType) or type(key) is not str:
            raise ValueError("it refers to a storage of no type, or no name")
        self.types.setdefault(key, kind)
        self.counts.setdefault(key, count)
        if (self.types[key], self.counts[key]) != (kind, count):
            raise ValueError(f"it has two storages {key[:40]!r}")
        first, numel = (0, count) if view is None else view[1:]
        if not all(type(n) is int and 0 <= n < 2**62 for n in (count, first, numel)):
            raise ValueError("it refers to a storage of no size")
        if first + numel > count:
            raise ValueError("it refers to a part outside of a storage")
        start = self.starts.get(key, 0) + first * kind.itemsize
        return Storage(self.file, start, numel * kind.itemsize, kind.dtype)


def _read_pickles(
    part: FileRange, data: bytes, stubs: Stubs, opaque: bool
) -> tuple[Any, tuple[str, ...]]:
    pickles = _in_turn(data, part.where)
    if next(pickles).value != MAGIC or next(pickles).value != PROTOCOL:
        raise FormatError(f"{part.where}: a file of torch.save of an unknown version")
    system = next(pickles)
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise FormatError(f"{part.where}: it was written by a big-endian machine: not read here")
    storages = _Storages(part.number)

    def read_values() -> Pickled:
        return unpickle(
            data, part.where, stubs=stubs, persistent=storages, opaque=opaque, start=system.end
        )

    keys = unpickle(data, part.where, start=read_values().end)
    _locate(part, storages, keys.value, keys.end)
    read = read_values()  # again, for now it is known where storages are
    return read.value, read.opaque


def _in_turn(data: bytes, where: str) -> Iterator[Pickled]:
    at = 0
    while True:
        read = unpickle(data, where, start=at)
        at = read.end
        yield read


def _locate(part: FileRange, storages: _Storages, keys: object, at: int) -> None:
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages.types):
        raise FormatError(f"{part.where}: the storages in it are not those it refers to")
    for key in keys:
        count = int.from_bytes(part.read(at, 8), "little")
        if count != storages.counts[key]:
            raise FormatError(f"{part.where}: storage {key[:40]!r} has another size than it should")
        size = count * storages.types[key].itemsize
        part.within(at + 8, size, f"storage {key[:40]!r}")
        storages.starts[key] = part.offset + at + 8
        at += 8 + size
