"""The directory of a zip archive: the offsets, sizes and checksums of uncompressed entries."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange

ZIP_START, ENTRY_SIGNATURE = b"PK\x03\x04", b"PK\x01\x02"
END_SIGNATURE, LOCATOR_SIGNATURE, END64_SIGNATURE = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
END_RECORD = struct.Struct("<4sHHHHIIH")
LOCATOR_RECORD = struct.Struct("<4sIQI")
END64_RECORD = struct.Struct("<4sQHHIIQQQQ")
ENTRY_RECORD = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_LONGEST_COMMENT = 2**16
ZIP64_FIELD_ID = 1
ENCRYPTED_FLAG = 1
MAX_UINT16, MAX_UINT32 = 0xFFFF, 0xFFFFFFFF
_LARGEST_WINDOW = 2**20
_HEADERS_TO_CHECK = 4
"""The number of headers to read if the offsets in the others follow from the alignment."""
_ALIGNMENT = 64
_DESCRIPTOR_SIZES = (0, 16, 24)
"""The possible sizes, in bytes, of the data descriptor after an entry; 0 without a descriptor."""
_LARGEST_GAP = 2**14
"""The largest gap in bytes between headers that are read in one request."""


class Entry(NamedTuple):
    """The content of an entry: its offset in the archive and its size, in bytes."""

    start: int
    size: int


def read_directory(archive: FileRange) -> dict[str, Entry]:
    """Return the entries by name, after comparing the header of each entry with the directory.

    Raises:
        FormatError: this is not a zip archive, or it is truncated; entries are compressed,
            encrypted, overlapping or duplicate; or headers contradict each other.
    """
    return {name: entry for name, entry, _ in _read_entries(archive)}


def read_entry_checksums(archive: FileRange) -> list[tuple[Entry, int]]:
    """Return each entry with its CRC-32 in the directory. Some writers store 0 there.

    Raises:
        FormatError: see `read_directory`.
    """
    return [(entry, crc32) for _, entry, crc32 in _read_entries(archive)]


def _read_entries(archive: FileRange) -> list[tuple[str, Entry, int]]:
    try:
        directory, count, directory_start = _read_directory_bytes(archive)
        entries = sorted(_list_entries(archive, directory, count))
        located = _locate_entries(archive, entries, directory_start)
        return [
            (name, entry, each.crc32) for each, (name, entry) in zip(entries, located, strict=True)
        ]
    except struct.error as error:
        raise FormatError(
            f"{archive.label}: the zip archive is truncated: copy the file again from an intact "
            "source"
        ) from error


def _damage_error(archive: FileRange, reason: str) -> FormatError:
    return FormatError(
        f"{archive.label}: the zip archive is damaged: {reason}; copy the file again from an "
        "intact source"
    )


class _DirectoryEntry(NamedTuple):
    """An entry in the directory. Entries are sorted by the offsets of their headers."""

    header_offset: int
    name: bytes
    size: int
    crc32: int


def _read_directory_bytes(archive: FileRange) -> tuple[bytes, int, int]:
    """Return the bytes of the directory, its number of entries, and its offset."""
    tail_offset = max(0, archive.size - END_RECORD.size - LOCATOR_RECORD.size - _LONGEST_COMMENT)
    tail = archive.read(tail_offset, archive.size - tail_offset)
    position = tail.rfind(END_SIGNATURE)
    if position < 0:
        raise FormatError(
            f"{archive.label}: not a zip archive, or truncated: copy the file again from an intact "
            "source"
        )
    _, disk, first_disk, _, count, size, start, _ = END_RECORD.unpack_from(tail, position)
    end_record_offset = tail_offset + position
    locator = tail[max(0, position - LOCATOR_RECORD.size) : position]
    if locator.startswith(LOCATOR_SIGNATURE):
        end_record_offset = LOCATOR_RECORD.unpack(locator)[2]
        fields = END64_RECORD.unpack(archive.read(end_record_offset, END64_RECORD.size))
        numbers_32 = count, size, start
        signature, disk, first_disk, count, size, start = fields[0], *fields[4:6], *fields[7:]
        records_agree = all(
            n in (wide, MAX_UINT16, MAX_UINT32)
            for n, wide in zip(numbers_32, (count, size, start), strict=True)
        )
        if signature != END64_SIGNATURE or not records_agree:
            raise _damage_error(archive, "its two end records contradict each other")
    if disk or first_disk or start + size != end_record_offset or count * ENTRY_RECORD.size > size:
        raise _damage_error(archive, "its directory is not before its end record")
    return archive.read(start, size), count, start


def _list_entries(archive: FileRange, directory: bytes, count: int) -> Iterator[_DirectoryEntry]:
    position = 0
    for _ in range(count):
        fields = ENTRY_RECORD.unpack_from(directory, position)
        signature, flags, method = fields[0], fields[3], fields[4]
        crc32, packed_size, size, name_size, extra_size, comment_size = fields[7:13]
        header_offset = fields[16]
        position += ENTRY_RECORD.size
        name = directory[position : position + name_size]
        position += name_size
        if signature != ENTRY_SIGNATURE or len(name) != name_size:
            raise _damage_error(archive, "its directory is malformed")
        if MAX_UINT32 in (packed_size, size, header_offset):
            extra = directory[position : position + extra_size]
            size, packed_size, header_offset = _read_sizes_and_offset(
                archive, extra, size, packed_size, header_offset
            )
        position += extra_size + comment_size
        if method or flags & ENCRYPTED_FLAG or packed_size != size:
            raise FormatError(
                f"{archive.label}: entry {name[:80]!r} is compressed or encrypted, so it "
                "cannot be read in place. For a TorchScript program, save the state_dict of its "
                "module; unpack any other archive and pack it again with `zip -0`"
            )
        yield _DirectoryEntry(header_offset, name, size, crc32)


def _read_sizes_and_offset(archive: FileRange, extra: bytes, *numbers_32: int) -> Iterator[int]:
    """Yield the numbers of an entry. A number that needs more than 32 bits is in `extra`."""
    position = 0
    while position + 4 <= len(extra):
        field_id, length = struct.unpack_from("<HH", extra, position)
        if field_id == ZIP64_FIELD_ID:
            numbers_64 = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            break
        position += 4 + length
    else:
        numbers_64 = iter(())
    for number in numbers_32:
        full_number = next(numbers_64, None) if number == MAX_UINT32 else number
        if full_number is None:
            raise _damage_error(archive, "an entry has no size or offset")
        yield full_number


def _locate_entries(
    archive: FileRange, entries: Sequence[_DirectoryEntry], directory_start: int
) -> Iterator[tuple[str, Entry]]:
    """Yield the name and content of each entry. The content follows the header of the entry."""
    starts = _infer_starts(archive, entries, directory_start) if archive.is_remote else None
    seen_names: set[bytes] = set()
    previous_end = 0
    for entry, start in zip(entries, starts or _read_starts(archive, entries), strict=True):
        if (
            entry.name in seen_names
            or entry.header_offset < previous_end
            or start + entry.size > archive.size
        ):
            raise _damage_error(
                archive, f"{entry.name[:80]!r} occurs twice, or overlaps another entry"
            )
        seen_names.add(entry.name)
        previous_end = start + entry.size
        yield entry.name.decode("utf-8", "replace"), Entry(start, entry.size)


def _infer_starts(
    archive: FileRange, entries: Sequence[_DirectoryEntry], directory_start: int
) -> list[int] | None:
    """Return the offset of each entry's content without reading all headers; None if unknown.

    torch.save aligns each content, and writes the next header or the directory directly after it.
    To check this, the headers of the first entries and of the last entry are read.
    """
    next_offsets = [*(entry.header_offset for entry in entries[1:]), directory_start]
    starts = []
    for entry, next_offset in zip(entries, next_offsets, strict=True):
        end_of_name = entry.header_offset + LOCAL_HEADER.size + len(entry.name)
        ends = (next_offset - size for size in _DESCRIPTOR_SIZES)
        aligned_starts = [end - entry.size for end in ends if (end - entry.size) % _ALIGNMENT == 0]
        if len(aligned_starts) != 1 or aligned_starts[0] < end_of_name:
            return None
        starts += aligned_starts
    checked_indices = sorted({*range(len(entries))[:_HEADERS_TO_CHECK], *range(len(entries))[-1:]})
    actual_starts = _read_starts(archive, [entries[index] for index in checked_indices])
    return starts if list(actual_starts) == [starts[index] for index in checked_indices] else None


def _read_starts(archive: FileRange, entries: Sequence[_DirectoryEntry]) -> Iterator[int]:
    """Yield where the content of each entry starts, after a check of its header."""
    for entry, header in zip(entries, _read_entry_headers(archive, entries), strict=True):
        signature, _, flags, method, _, _, _, packed_size, size, name_size, extra_size = (
            LOCAL_HEADER.unpack_from(header)
        )
        name = header[LOCAL_HEADER.size :]
        size_fits = packed_size == size and (
            size in (entry.size, MAX_UINT32) or (flags & 8 and not size)
        )
        if signature != ZIP_START or method or name != entry.name or name_size != len(name):
            raise _damage_error(archive, f"header and directory disagree about {entry.name[:80]!r}")
        if not size_fits or flags & ENCRYPTED_FLAG:
            raise _damage_error(
                archive, f"header and directory disagree about the size of {entry.name[:80]!r}"
            )
        yield entry.header_offset + LOCAL_HEADER.size + name_size + extra_size


def _read_entry_headers(archive: FileRange, entries: Sequence[_DirectoryEntry]) -> Iterator[bytes]:
    """Yield the headers of entries, including names. Nearby headers are read in one request."""
    window, window_start = b"", 0
    for index, entry in enumerate(entries):
        end = entry.header_offset + LOCAL_HEADER.size + len(entry.name)
        if end > window_start + len(window):
            window_start, window_end = entry.header_offset, end
            for other in entries[index + 1 :]:
                other_end = other.header_offset + LOCAL_HEADER.size + len(other.name)
                gap = other.header_offset - window_end
                if gap > _LARGEST_GAP or other_end - window_start > _LARGEST_WINDOW:
                    break
                window_end = max(window_end, other_end)
            window = archive.read(window_start, window_end - window_start)
        yield window[entry.header_offset - window_start : end - window_start]
