"""Plan zip archives as torch.save writes them, before the bytes of tensors are known.

Entries are not compressed. The checksum of a tensor follows its bytes, as in torch's archives. The
central directory at the end lists all checksums.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from functools import partial

from shardwise.convert.plan import (
    BytesFromChecksums,
    OutputFile,
    RangeChecksums,
    TensorPart,
    size_of,
)
from shardwise.manifest.checksums import crc32

ALIGNMENT = 64
MAX_UINT16, MAX_UINT32 = 0xFFFF, 0xFFFFFFFF
ENTRY_SIGNATURE, END_SIGNATURE = b"PK\x01\x02", b"PK\x05\x06"
LOCATOR_SIGNATURE, END64_SIGNATURE = b"PK\x06\x07", b"PK\x06\x06"
END_RECORD = struct.Struct("<4sHHHHIIH")
LOCATOR_RECORD = struct.Struct("<4sIQI")
END64_RECORD = struct.Struct("<4sQHHIIQQQQ")
ENTRY_RECORD = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR_MARK = b"PK\x07\x08"
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_ZIP64_FIELD = 1
"""The id of the extra field with 64-bit numbers."""
_PADDING_FIELD = struct.Struct("<2sH")
_VERSION_PLAIN, _VERSION_ZIP64 = 20, 45
"""Versions of the zip format that a reader needs, without and with 64-bit numbers."""
_FLAG_UTF8, _FLAG_DATA_DESCRIPTOR = 0x800, 8
"""Flags of an entry: its name is UTF-8; its checksum follows its content."""
_FIRST_DATE = 0x21
"""1980-01-01, the first date that zip can represent."""
_ENTRIES_PER_SEGMENT = 4096


_Entry = tuple[zipfile.ZipInfo, int | None]
"""An entry of an archive, and the index of its checksum in `RangeChecksums`; None if the entry has
its checksum already, as `ZipInfo.CRC`."""


class ArchiveBuilder:
    """Plans a zip archive at the end of a file. Offsets count from the start of the archive.

    The checksums of tensors are known only once their bytes are written. So they follow the bytes,
    in a data descriptor.
    """

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._start = file.size
        self._entries: list[_Entry] = []

    def add(self, name: str, content: bytes | TensorPart) -> None:
        """Append an entry. Its content is aligned if the start of the archive is aligned.

        The checksum of bytes is in the header before them; that of a tensor is in a descriptor
        after it. The central directory repeats both.
        """
        file, size = self._file, size_of(content)
        is_large = size > zipfile.ZIP64_LIMIT
        entry = zipfile.ZipInfo(name)
        entry.header_offset = file.size - self._start
        entry.file_size = entry.compress_size = size
        has_descriptor = isinstance(content, TensorPart) and size > 0
        entry.flag_bits = _FLAG_UTF8 | (_FLAG_DATA_DESCRIPTOR if has_descriptor else 0)
        entry.CRC = crc32(content) if isinstance(content, bytes) else 0
        end = entry.header_offset + len(entry.FileHeader(is_large)) + _PADDING_FIELD.size
        padding = -end % ALIGNMENT
        entry.extra = _PADDING_FIELD.pack(b"FB", padding) + b"Z" * padding
        file.add(entry.FileHeader(is_large))
        if isinstance(content, TensorPart) and has_descriptor:
            checksum_index = file.add_with_checksum(content)
            file.add(_make_descriptor(checksum_index, size))
            self._entries.append((entry, checksum_index))
        else:
            file.add(content)
            self._entries.append((entry, None))

    def close(self) -> None:
        """Append the central directory, and the records that say where it is.

        An archive ends with these parts; `_add_end_records` adds the last three:

            directory entries, one for each entry of the archive
            64-bit end record, which has all counts and offsets   (only large archives)
            locator, which has the offset of the 64-bit record    (only large archives)
            end record, with 16 and 32 bits for counts and offsets
        """
        file = self._file
        start = file.size - self._start
        for low in range(0, len(self._entries), _ENTRIES_PER_SEGMENT):
            entries = self._entries[low : low + _ENTRIES_PER_SEGMENT]
            size = len(_encode_directory(entries, None))
            file.add(BytesFromChecksums(size, partial(_encode_directory, entries)))
        self._add_end_records(start)

    def _add_end_records(self, start: int) -> None:
        """Append the end records of a directory that begins at `start`."""
        file, count = self._file, len(self._entries)
        end = file.size - self._start
        size = end - start
        if count >= MAX_UINT16 or end >= MAX_UINT32:
            # The record states its own size, but without the 4 bytes of the signature and the
            # 8 bytes of this number.
            stated_size = END64_RECORD.size - 12
            fields = (_VERSION_ZIP64, _VERSION_ZIP64, 0, 0, count, count, size, start)
            file.add(END64_RECORD.pack(END64_SIGNATURE, stated_size, *fields))
            file.add(LOCATOR_RECORD.pack(LOCATOR_SIGNATURE, 0, end, 1))
        # The largest number in a field of the end record means: see the 64-bit record.
        count = min(count, MAX_UINT16)
        size, start = min(size, MAX_UINT32), min(start, MAX_UINT32)
        file.add(END_RECORD.pack(END_SIGNATURE, 0, 0, count, count, size, start, 0))


def _make_descriptor(checksum_index: int, size: int) -> BytesFromChecksums:
    layout = _DESCRIPTOR64 if size > zipfile.ZIP64_LIMIT else _DESCRIPTOR
    return BytesFromChecksums(
        layout.size, lambda sums: layout.pack(_DESCRIPTOR_MARK, sums[checksum_index], size, size)
    )


def _encode_directory(entries: Sequence[_Entry], sums: RangeChecksums | None) -> bytes:
    """Return the directory records of entries; without sums, a placeholder of the same size."""
    records = []
    for entry, checksum_index in entries:
        name, header = entry.filename.encode(), entry.header_offset
        zip64 = [n for n in (entry.file_size, entry.file_size, header) if n >= MAX_UINT32]
        extra = (
            struct.pack(f"<HH{len(zip64)}Q", _ZIP64_FIELD, 8 * len(zip64), *zip64) if zip64 else b""
        )
        needed = _VERSION_ZIP64 if zip64 else _VERSION_PLAIN
        crc = entry.CRC if sums is None or checksum_index is None else sums[checksum_index]
        size = min(entry.file_size, MAX_UINT32)
        head = (needed, needed, entry.flag_bits, 0, 0, _FIRST_DATE, crc, size, size)
        rest = (len(name), len(extra), 0, 0, 0, 0, min(header, MAX_UINT32))
        records.append(ENTRY_RECORD.pack(ENTRY_SIGNATURE, *head, *rest) + name + extra)
    return b"".join(records)
