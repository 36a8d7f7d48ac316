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
_UTF8, _SUM_FOLLOWS = 0x800, 8
_FIRST_DATE = 0x21
"""1980-01-01, the first date that zip can represent."""
_ENTRIES_AT_ONCE = 4096


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
        """Append an entry. Its content is aligned if the start of the archive is aligned."""
        file, size, sum_index = self._file, size_of(content), None
        is_large = size > zipfile.ZIP64_LIMIT
        sum_follows = isinstance(content, TensorPart) and size > 0
        entry = zipfile.ZipInfo(name)
        entry.header_offset = file.size - self._start
        entry.file_size = entry.compress_size = size
        entry.flag_bits = _UTF8 | (_SUM_FOLLOWS if sum_follows else 0)
        entry.CRC = crc32(content) if isinstance(content, bytes) else 0
        end = entry.header_offset + len(entry.FileHeader(is_large)) + _PADDING_FIELD.size
        padding = -end % ALIGNMENT
        entry.extra = _PADDING_FIELD.pack(b"FB", padding) + b"Z" * padding
        file.add(entry.FileHeader(is_large))
        if isinstance(content, TensorPart) and size:
            sum_index = file.add_with_checksum(content)
            file.add(_make_descriptor(sum_index, size))
        else:
            file.add(content)
        self._entries.append((entry, sum_index))

    def close(self) -> None:
        """Append the central directory."""
        file, count = self._file, len(self._entries)
        start = file.size - self._start
        for low in range(0, count, _ENTRIES_AT_ONCE):
            entries = self._entries[low : low + _ENTRIES_AT_ONCE]
            file.add(
                BytesFromChecksums(
                    len(_encode_directory(entries, None)), partial(_encode_directory, entries)
                )
            )
        end = file.size - self._start
        if count >= MAX_UINT16 or end >= MAX_UINT32:
            fields = (_VERSION_ZIP64, _VERSION_ZIP64, 0, 0, count, count, end - start, start)
            # The size in the record does not count the signature and itself: 12 bytes.
            file.add(END64_RECORD.pack(END64_SIGNATURE, END64_RECORD.size - 12, *fields))
            file.add(LOCATOR_RECORD.pack(LOCATOR_SIGNATURE, 0, end, 1))
        stated_count, size, stated_start = (
            min(count, MAX_UINT16),
            min(end - start, MAX_UINT32),
            min(start, MAX_UINT32),
        )
        file.add(
            END_RECORD.pack(END_SIGNATURE, 0, 0, stated_count, stated_count, size, stated_start, 0)
        )


def _make_descriptor(sum_index: int, size: int) -> BytesFromChecksums:
    layout = _DESCRIPTOR64 if size > zipfile.ZIP64_LIMIT else _DESCRIPTOR
    return BytesFromChecksums(
        layout.size, lambda sums: layout.pack(_DESCRIPTOR_MARK, sums[sum_index], size, size)
    )


def _encode_directory(entries: Sequence[_Entry], sums: RangeChecksums | None) -> bytes:
    """Return the directory records of entries; without sums, a placeholder of the same size."""
    records = []
    for entry, sum_index in entries:
        name, header = entry.filename.encode(), entry.header_offset
        zip64 = [n for n in (entry.file_size, entry.file_size, header) if n >= MAX_UINT32]
        extra = (
            struct.pack(f"<HH{len(zip64)}Q", _ZIP64_FIELD, 8 * len(zip64), *zip64) if zip64 else b""
        )
        needed = _VERSION_ZIP64 if zip64 else _VERSION_PLAIN
        crc = entry.CRC if sums is None or sum_index is None else sums[sum_index]
        size = min(entry.file_size, MAX_UINT32)
        head = (needed, needed, entry.flag_bits, 0, 0, _FIRST_DATE, crc, size, size)
        rest = (len(name), len(extra), 0, 0, 0, 0, min(header, MAX_UINT32))
        records.append(ENTRY_RECORD.pack(ENTRY_SIGNATURE, *head, *rest) + name + extra)
    return b"".join(records)
