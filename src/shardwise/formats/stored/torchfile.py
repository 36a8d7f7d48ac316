"""Files of torch.save: their values, with places in the file where tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.stored.archive import START, Entry, read_directory
from shardwise.formats.stored.legacy import is_legacy, read_legacy
from shardwise.formats.stored.pickled import Opaque, Record, Stubs
from shardwise.formats.stored.pickles import unpickle
from shardwise.formats.stored.ranges import Part
from shardwise.formats.stored.torchtypes import (
    RESOLVE,
    TORCH,
    UNRESOLVED,
    Storage,
    StorageType,
    Unresolved,
    UnresolvedError,
)
from shardwise.formats.tree import LARGEST_PICKLE, MOST_NAMED

_PICKLE = "/data.pkl"


@dataclass(frozen=True, slots=True)
class Contents:
    """What torch.save was given: tensors and parameters are `StoredArray`s, storages `Storage`s.

    Tensors that are one have equal `StoredArray`s. `opaque` are names of what was left out. `file`
    is the number that arrays have for their file: of another one, if that was found to be alike.
    """

    value: Any
    opaque: tuple[str, ...]
    file: int


class Alike:
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
    part: Part, *, stubs: Stubs | None = None, opaque: bool = False, alike: Alike | None = None
) -> Contents:
    """Read the values of a file of torch.save, or of a part of a file that is like one.

    No byte of a tensor is read. See `unpickle` for the arguments. With `alike`, the value may be
    that of another file, which says so.

    Raises:
        FormatError: it is none, is malformed or cut off, was written by a big-endian machine, or
            holds what is not read from pickles.
    """
    table = {**TORCH, **(stubs or {})}
    try:
        return _read(part, table, opaque, alike)
    except UnresolvedError as error:
        found = _read(part, {**table, **UNRESOLVED}, True, None).value
        names = [name for name in _unresolved(found, "") if name]
        if not names:
            raise
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        said = f"{', '.join(names[:MOST_NAMED])}{more}: {RESOLVE}"
        raise FormatError(f"{part.where}: {said}") from error


def _read(part: Part, table: Stubs, opaque: bool, alike: Alike | None) -> Contents:
    head = part.read(0, min(64, part.size))
    if head.startswith(START):
        return _read_zip(part, table, opaque, alike)
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


def pickle_text(part: Part) -> bytes:
    """The pickle of a file of torch.save that is a zip archive, as it lies there.

    Raises:
        FormatError: it is none, or malformed.
    """
    return _pickle_of(part, read_directory(part))[1]


def _pickle_of(part: Part, entries: Mapping[str, Entry]) -> tuple[str, bytes]:
    """The folder of all entries, and the pickle."""
    names = [name for name in entries if name.endswith(_PICKLE) and name.count("/") == 1]
    if len(names) != 1:
        raise FormatError(f"{part.where}: a zip archive, and not of torch.save: it has no data.pkl")
    data = entries[names[0]]
    if data.size > LARGEST_PICKLE:
        raise FormatError(f"{part.where}: its pickle has {data.size} bytes; at most 2^31 are read")
    return names[0].removesuffix(_PICKLE), part.read(data.start, data.size)


def _read_zip(part: Part, stubs: Stubs, opaque: bool, alike: Alike | None) -> Contents:
    entries = read_directory(part)
    folder, text = _pickle_of(part, entries)
    order = entries.get(f"{folder}/byteorder")
    if order is not None and part.read(order.start, min(order.size, 16)) != b"little":
        raise FormatError(f"{part.where}: it was written by a big-endian machine: not read here")
    prefix = f"{folder}/data/"
    places = {n.removeprefix(prefix): e for n, e in entries.items() if n.startswith(prefix)}
    parse = partial(_parse, part, text, places, stubs, opaque)
    return parse() if alike is None or part.offset else alike.find(text, places, parse)


def _parse(
    part: Part, text: bytes, places: Mapping[str, Entry], stubs: Stubs, opaque: bool
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
