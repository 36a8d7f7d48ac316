"""Files of torch.save before version 1.6: pickles one after another, then the storages."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.stored.opcodes import CutOffError
from shardwise.formats.stored.pickled import Opaque, Stubs
from shardwise.formats.stored.pickles import Pickled, unpickle
from shardwise.formats.stored.ranges import Part
from shardwise.formats.stored.torchtypes import Storage, StorageType
from shardwise.formats.tree import LARGEST_PICKLE

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_HEADS = [pickle.dumps(MAGIC, protocol) for protocol in range(2, 6)]
_FIRST_READ = 2**20


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins like this is one."""
    return any(head.startswith(each.rstrip(b".")) for each in _HEADS)


def read_legacy(part: Part, stubs: Stubs, opaque: bool) -> tuple[Any, tuple[str, ...]]:
    """The value of such a file, and the names that were not on the list.

    Raises:
        FormatError: it is malformed.
    """
    most = min(part.size, LARGEST_PICKLE)
    size = min(_FIRST_READ, most)
    while size < most:  # the pickles are a small part of it, of unknown size
        with suppress(CutOffError):
            return _read(part, part.read(0, size), stubs, opaque)
        size = min(8 * size, most)
    return _read(part, part.read(0, size), stubs, opaque)


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


def _read(part: Part, data: bytes, stubs: Stubs, opaque: bool) -> tuple[Any, tuple[str, ...]]:
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


def _locate(part: Part, storages: _Storages, keys: object, at: int) -> None:
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
