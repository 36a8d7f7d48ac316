"""Zip archives as torch.save writes them, planned before the bytes of tensors are known.

Entries are not compressed. The checksum of a tensor follows its bytes, as in archives of torch; the
directory at the end has all checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardwise.convert.plan import Late, Output, Part, Segment, Sums, size_of
from shardwise.formats.containers.zip_archive import (
    END,
    END64,
    END64_MARK,
    END_MARK,
    ENTRY,
    ENTRY_MARK,
    FULL16,
    FULL32,
    LOCAL,
    LOCATOR,
    LOCATOR_MARK,
    ZIP_START,
)
from shardwise.manifest.checksums import crc32

ALIGNMENT = 64
_DESCRIPTOR_MARK = b"PK\x07\x08"
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_WIDE = 1
"""The id of the extra field with 64-bit numbers."""
_PADDING = struct.Struct("<2sH")
_PLAIN, _WITH_WIDE = 20, 45
"""Versions of the zip format that readers must support."""
_UTF8, _SUM_FOLLOWS = 0x800, 8
_DATE = 0x21
"""1980-01-01, the first date that zip can represent."""
_ENTRIES_AT_ONCE = 4096


class Growing:
    """A file that is planned from front to back.

    Args:
        name: the path below the target.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self._segments: list[Segment] = []
        self._marks: list[int] = []

    def add(self, segment: Segment) -> None:
        """Append a segment."""
        self._segments.append(segment)
        self.size += size_of(segment)

    def add_summed(self, part: Part) -> int:
        """Append a part that is not empty. Returns the number of its checksum in the file."""
        if self._marks[-1:] != [self.size] and self.size:
            self._marks.append(self.size)
        self.add(part)
        self._marks.append(self.size)
        return len(self._marks) - 1

    def align(self) -> None:
        """Pad the file to a multiple of `ALIGNMENT`."""
        self.add(bytes(-self.size % ALIGNMENT))

    def output(self) -> Output:
        """Return the planned file."""
        return Output(self.name, tuple(self._segments), tuple(self._marks))


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of an archive: the offset of its header, and its checksum or the checksum's number
    in the file."""

    name: bytes
    header: int
    size: int
    known: int = 0
    number: int | None = None

    def crc(self, sums: Sums) -> int:
        return self.known if self.number is None else sums[self.number]


class Archive:
    """An archive that is appended to a file. Its offsets count from its own beginning."""

    def __init__(self, file: Growing) -> None:
        self._file = file
        self._start = file.size
        self._entries: list[_Entry] = []

    def add(self, name: str, content: bytes | Part) -> None:
        """Add an entry. Its bytes are aligned if the beginning of the archive is."""
        file, encoded, size = self._file, name.encode(), size_of(content)
        header = file.size - self._start
        wide = struct.pack("<HHQQ", _WIDE, 16, size, size) if size >= FULL32 else b""
        late = isinstance(content, Part) and size > 0
        known = crc32(content) if isinstance(content, bytes) else 0
        fields = (_WITH_WIDE if wide else _PLAIN, _flags(late), 0, 0, _DATE, known)
        stated = FULL32 if wide else 0 if late else size
        padding = -(header + LOCAL.size + len(encoded) + len(wide) + _PADDING.size) % ALIGNMENT
        extra = wide + _PADDING.pack(b"FB", padding) + b"Z" * padding
        file.add(
            LOCAL.pack(ZIP_START, *fields, stated, stated, len(encoded), len(extra))
            + encoded
            + extra
        )
        if isinstance(content, Part) and late:
            number = file.add_summed(content)
            file.add(_descriptor(number, size))
            self._entries.append(_Entry(encoded, header, size, number=number))
        else:
            file.add(content)
            self._entries.append(_Entry(encoded, header, size, known))

    def close(self) -> None:
        """Append the directory."""
        file, count = self._file, len(self._entries)
        start = file.size - self._start
        for low in range(0, count, _ENTRIES_AT_ONCE):
            entries = self._entries[low : low + _ENTRIES_AT_ONCE]
            file.add(Late(len(_directory(entries, None)), partial(_directory, entries)))
        end = file.size - self._start
        if count >= FULL16 or end >= FULL32:
            fields = (_WITH_WIDE, _WITH_WIDE, 0, 0, count, count, end - start, start)
            file.add(END64.pack(END64_MARK, END64.size - 12, *fields))
            file.add(LOCATOR.pack(LOCATOR_MARK, 0, end, 1))
        few, size, at = min(count, FULL16), min(end - start, FULL32), min(start, FULL32)
        file.add(END.pack(END_MARK, 0, 0, few, few, size, at, 0))


def _flags(late: bool) -> int:
    return _UTF8 | (_SUM_FOLLOWS if late else 0)


def _descriptor(number: int, size: int) -> Late:
    layout = _DESCRIPTOR64 if size >= FULL32 else _DESCRIPTOR
    return Late(layout.size, lambda sums: layout.pack(_DESCRIPTOR_MARK, sums[number], size, size))


def _directory(entries: Sequence[_Entry], sums: Sums | None) -> bytes:
    """Return the directory of entries; without sums, a placeholder of the same size."""
    listed = []
    for entry in entries:
        wide = [n for n in (entry.size, entry.size, entry.header) if n >= FULL32]
        extra = struct.pack(f"<HH{len(wide)}Q", _WIDE, 8 * len(wide), *wide) if wide else b""
        needed = _WITH_WIDE if wide else _PLAIN
        crc = 0 if sums is None else entry.crc(sums)
        size, header = min(entry.size, FULL32), min(entry.header, FULL32)
        head = (needed, needed, _flags(entry.number is not None), 0, 0, _DATE, crc, size, size)
        rest = (len(entry.name), len(extra), 0, 0, 0, 0, header)
        listed.append(ENTRY.pack(ENTRY_MARK, *head, *rest) + entry.name + extra)
    return b"".join(listed)
