"""The directory of a zip archive: the offsets, sizes and checksums of uncompressed entries."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import SEEK_CUR, SEEK_END, RawIOBase
from zipfile import BadZipFile, ZipFile, ZipInfo

from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.containers.ranges import FileRange

ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MAX_UINT32 = 0xFFFFFFFF
_ENCRYPTED_FLAG, _SIZE_FOLLOWS_FLAG, _UTF8_FLAG = 1, 8, 0x800
_HEADERS_TO_CHECK = 4
"""If the alignment gives the offsets of all contents, only so many first headers, and the last one,
are read to check the offsets."""
_ALIGNMENT = 64
_DESCRIPTOR_SIZES = (0, 16, 24)
"""The possible sizes, in bytes, of the data descriptor after an entry; 0 without a descriptor."""


def read_directory(archive: FileRange) -> dict[str, tuple[int, int]]:
    """Return, for each entry by name, the offset of its content in the archive, and its size.

    The header of each entry is compared with the directory.

    Raises:
        FormatError: this is not a zip archive, or it is truncated; entries are compressed,
            encrypted, overlapping or duplicate; or headers contradict each other.
    """
    entries, starts = _read_entries(archive)
    return {
        entry.orig_filename: (start, entry.file_size)
        for entry, start in zip(entries, starts, strict=True)
    }


def read_entry_checksums(file: FileRange) -> Iterator[tuple[int, int, int]]:
    """Yield the offset, size and CRC-32 of each entry in a file of one or more archives.

    Some writers store 0 as the CRC-32.

    Raises:
        FormatError: see `read_directory`.
    """
    end = file.size
    while end > 0:
        entries, starts = _read_entries(replace(file, size=end))
        for entry, start in zip(entries, starts, strict=True):
            yield start, entry.file_size, entry.CRC
        end = entries[0].header_offset if entries else 0


class _RangeIO(RawIOBase):
    """A range of a file, as `ZipFile` reads it. It returns no more bytes than the range has."""

    def __init__(self, file_range: FileRange) -> None:
        self._range = file_range
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        start = {SEEK_CUR: self._position, SEEK_END: self._range.size}.get(whence, 0)
        if start + offset < 0:
            raise ValueError("an offset is negative")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._range.size - self._position)
        data = self._range.read(
            min(self._position, self._range.size),
            rest if size is None or size < 0 else min(size, rest),
        )
        self._position += len(data)
        return data


def _list_entries(archive: FileRange) -> tuple[list[ZipInfo], int]:
    """Return the entries, sorted by the offsets of their headers, and the directory's offset."""
    try:
        with ZipFile(_RangeIO(archive)) as opened:
            entries = sorted(opened.infolist(), key=lambda entry: entry.header_offset)
            directory_start: int = opened.start_dir
    except BadZipFile as error:
        raise FormatError(
            f"{archive.label}: not a zip archive, or truncated ({error}): copy the file again from "
            "an intact source"
        ) from error
    except (ValueError, LookupError, ArithmeticError, NotImplementedError, struct.error) as error:
        if isinstance(error, FormatError):
            raise
        raise _damage_error(archive, f"its directory is malformed ({error})") from error
    if entries and entries[0].header_offset < 0:
        raise _damage_error(archive, "by its directory, an entry begins before the archive")
    for entry in entries:
        is_encrypted = entry.flag_bits & _ENCRYPTED_FLAG
        if entry.compress_type or is_encrypted or entry.compress_size != entry.file_size:
            raise FormatError(
                f"{archive.label}: entry {entry.orig_filename[:80]!r} is compressed or encrypted, "
                "so it cannot be read in place. For a TorchScript program, save the state_dict of "
                "its module; unpack any other archive and pack it again with `zip -0`"
            )
    return entries, directory_start


def _damage_error(archive: FileRange, reason: str) -> FormatError:
    return FormatError(
        f"{archive.label}: the zip archive is damaged: {reason}; copy the file again from an "
        "intact source"
    )


def _read_entries(archive: FileRange) -> tuple[list[ZipInfo], list[int]]:
    """Return the entries, and the offset of each entry's content, which follows its header."""
    entries, directory_start = _list_entries(archive)
    starts = _infer_starts(archive, entries, directory_start) if archive.is_remote else None
    if starts is None:
        starts = list(_read_starts(archive, entries))
    seen_names: set[str] = set()
    previous_end = 0
    for entry, start in zip(entries, starts, strict=True):
        name = entry.orig_filename
        end = start + entry.file_size
        if name in seen_names or entry.header_offset < previous_end or end > archive.size:
            raise _damage_error(archive, f"{name[:80]!r} occurs twice, or overlaps another entry")
        seen_names.add(name)
        previous_end = end
    return entries, starts


def _encoded_name(entry: ZipInfo) -> bytes:
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8_FLAG else "cp437")


def _infer_starts(
    archive: FileRange, entries: Sequence[ZipInfo], directory_start: int
) -> list[int] | None:
    """Return the offset of each entry's content without reading all headers; None if unknown.

    torch.save aligns each content, and writes the next header or the directory directly after it.
    To check this, the headers of the first entries and of the last entry are read.
    """
    next_offsets = [*(entry.header_offset for entry in entries[1:]), directory_start]
    starts = []
    for entry, next_offset in zip(entries, next_offsets, strict=True):
        end_of_name = entry.header_offset + _LOCAL_HEADER.size + len(_encoded_name(entry))
        ends = (next_offset - size for size in _DESCRIPTOR_SIZES)
        aligned_starts = [
            end - entry.file_size for end in ends if (end - entry.file_size) % _ALIGNMENT == 0
        ]
        if len(aligned_starts) != 1 or aligned_starts[0] < end_of_name:
            return None
        starts += aligned_starts
    checked_indices = sorted({*range(len(entries))[:_HEADERS_TO_CHECK], *range(len(entries))[-1:]})
    actual_starts = _read_starts(archive, [entries[index] for index in checked_indices])
    return starts if list(actual_starts) == [starts[index] for index in checked_indices] else None


def _read_starts(archive: FileRange, entries: Sequence[ZipInfo]) -> Iterator[int]:
    """Yield where the content of each entry starts, after a check of its header."""
    sizes = (_LOCAL_HEADER.size + len(_encoded_name(entry)) for entry in entries)
    headers = archive.read_ranges(zip((e.header_offset for e in entries), sizes, strict=True))
    for entry, header in zip(entries, headers, strict=True):
        signature, _, flags, method, _, _, _, packed_size, size, name_size, extra_size = (
            _LOCAL_HEADER.unpack_from(header)
        )
        name = _encoded_name(entry)
        size_fits = packed_size == size and (
            size in (entry.file_size, _MAX_UINT32) or (flags & _SIZE_FOLLOWS_FLAG and not size)
        )
        if (
            signature != ZIP_START
            or method
            or header[_LOCAL_HEADER.size :] != name
            or name_size != len(name)
        ):
            raise _damage_error(
                archive, f"header and directory disagree about {entry.orig_filename[:80]!r}"
            )
        if not size_fits or flags & _ENCRYPTED_FLAG:
            raise _damage_error(
                archive,
                f"header and directory disagree about the size of {entry.orig_filename[:80]!r}",
            )
        yield entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
