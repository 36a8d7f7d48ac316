"""Zip archives with uncompressed entries: where the bytes of each entry are."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange

START, ENTRY_MARK = b"PK\x03\x04", b"PK\x01\x02"
END_MARK, LOCATOR_MARK, END64_MARK = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
END = struct.Struct("<4sHHHHIIH")
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<4sHHHHHIIIHH")
_MOST_COMMENT = 2**16
ENCRYPTED = 1
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
_WINDOW = 2**20
_GAP = 2**14
"""Headers that are closer to each other than this are read in one request."""


class Entry(NamedTuple):
    """The bytes of an entry: their start in the archive, and their number."""

    start: int
    size: int


def read_directory(archive: FileRange) -> dict[str, Entry]:
    """Return the entries by name. Each entry's own header is compared with the directory.

    Raises:
        FormatError: it is not a zip archive or is cut off, has compressed, encrypted, overlapping
            or duplicate entries, or its headers contradict each other.
    """
    return {name: entry for name, entry, _ in _read(archive)}


def read_sums(archive: FileRange) -> list[tuple[Entry, int]]:
    """Return the entries with their CRC-32 in the directory, which is 0 for some writers.

    Raises:
        FormatError: see `read_directory`.
    """
    return [(entry, crc32) for _, entry, crc32 in _read(archive)]


def _read(archive: FileRange) -> list[tuple[str, Entry, int]]:
    try:
        directory, count = _directory(archive)
        listed = sorted(_listed(archive, directory, count))
        located = _located(archive, listed)
        return [
            (name, entry, each.crc32) for each, (name, entry) in zip(listed, located, strict=True)
        ]
    except struct.error as error:
        raise FormatError(f"{archive.where}: this zip archive is cut off") from error


class _Listed(NamedTuple):
    """An entry in the directory. Sorting puts entries in the order of their headers."""

    header: int
    name: bytes
    size: int
    crc32: int


def _directory(archive: FileRange) -> tuple[bytes, int]:
    """Return the bytes of the directory, and its number of entries."""
    tail_at = max(0, archive.size - END.size - LOCATOR.size - _MOST_COMMENT)
    tail = archive.read(tail_at, archive.size - tail_at)
    at = tail.rfind(END_MARK)
    if at < 0:
        raise FormatError(
            f"{archive.where}: not a zip archive, or the file was cut off: copy it again"
        )
    _, disk, first_disk, _, count, size, start, _ = END.unpack_from(tail, at)
    end = tail_at + at
    locator = tail[max(0, at - LOCATOR.size) : at]
    if locator.startswith(LOCATOR_MARK):
        end = LOCATOR.unpack(locator)[2]
        fields = END64.unpack(archive.read(end, END64.size))
        narrow = count, size, start
        signature, disk, first_disk, count, size, start = fields[0], *fields[4:6], *fields[7:]
        agree = all(
            n in (wide, FULL16, FULL32)
            for n, wide in zip(narrow, (count, size, start), strict=True)
        )
        if signature != END64_MARK or not agree:
            raise FormatError(f"{archive.where}: this zip archive's two ends contradict each other")
    if disk or first_disk or start + size != end or count * ENTRY.size > size:
        raise FormatError(
            f"{archive.where}: the directory of this zip archive is not where it should be"
        )
    return archive.read(start, size), count


def _listed(archive: FileRange, directory: bytes, count: int) -> Iterator[_Listed]:
    at = 0
    for _ in range(count):
        fields = ENTRY.unpack_from(directory, at)
        signature, flags, method = fields[0], fields[3], fields[4]
        crc32, packed, size, name_size, extra_size, comment_size = fields[7:13]
        header = fields[16]
        at += ENTRY.size
        name = directory[at : at + name_size]
        at += name_size
        if signature != ENTRY_MARK or len(name) != name_size:
            raise FormatError(f"{archive.where}: the directory of this zip archive is damaged")
        if FULL32 in (packed, size, header):
            extra = directory[at : at + extra_size]
            size, packed, header = _wide(archive, extra, size, packed, header)
        at += extra_size + comment_size
        if method or flags & ENCRYPTED or packed != size:
            raise FormatError(
                f"{archive.where}: entry {name[:80]!r} is compressed or encrypted, so it "
                "cannot be read in place. For a TorchScript program, save the state_dict of its "
                "module; unpack any other archive and pack it again with `zip -0`"
            )
        yield _Listed(header, name, size, crc32)


def _wide(archive: FileRange, extra: bytes, *narrow: int) -> Iterator[int]:
    """Yield numbers of an entry; those too large for their fields are in the extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            break
        at += 4 + length
    else:
        wide = iter(())
    for number in narrow:
        found = next(wide, None) if number == FULL32 else number
        if found is None:
            raise FormatError(f"{archive.where}: an entry of this zip archive has no size")
        yield found


def _located(archive: FileRange, listed: Sequence[_Listed]) -> Iterator[tuple[str, Entry]]:
    """Find the bytes of entries from the headers before them."""
    seen: set[bytes] = set()
    before = 0
    for entry, header in zip(listed, _headers(archive, listed), strict=True):
        signature, _, flags, method, _, _, _, packed, size, name_size, extra = LOCAL.unpack_from(
            header
        )
        name = header[LOCAL.size :]
        known = packed == size and (size in (entry.size, FULL32) or (flags & 8 and not size))
        if signature != START or method or name != entry.name or name_size != len(name):
            raise FormatError(
                f"{archive.where}: {entry.name[:80]!r} has a header unlike its directory entry"
            )
        start = entry.header + LOCAL.size + name_size + extra
        if not known or flags & ENCRYPTED:
            raise FormatError(
                f"{archive.where}: {entry.name[:80]!r} has a size that its header contradicts"
            )
        if entry.name in seen or entry.header < before or start + entry.size > archive.size:
            raise FormatError(
                f"{archive.where}: {entry.name[:80]!r} occurs twice, or overlaps another entry"
            )
        seen.add(entry.name)
        before = start + entry.size
        yield entry.name.decode("utf-8", "replace"), Entry(start, entry.size)


def _headers(archive: FileRange, listed: Sequence[_Listed]) -> Iterator[bytes]:
    """Yield the headers before entries, including names; read nearby ones in one request."""
    window, at = b"", 0
    for index, entry in enumerate(listed):
        end = entry.header + LOCAL.size + len(entry.name)
        if end > at + len(window):
            at, last = entry.header, end
            for other in listed[index + 1 :]:
                stop = other.header + LOCAL.size + len(other.name)
                if other.header - last > _GAP or stop - at > _WINDOW:
                    break
                last = max(last, stop)
            window = archive.read(at, last - at)
        yield window[entry.header - at : end - at]
