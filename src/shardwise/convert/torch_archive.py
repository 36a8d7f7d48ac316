"""Plan zip archives as torch.save writes them, before the bytes of tensors are known.

Entries are not compressed. The checksum of a tensor follows its bytes, as in torch's archives. The
central directory at the end lists all checksums.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from functools import partial
from zipfile import ZIP64_LIMIT, ZipFile, ZipInfo

from shardwise.convert.plan import (
    BytesFromChecksums,
    OutputFile,
    RangeChecksums,
    TensorPart,
    size_of,
)
from shardwise.manifest.checksums import crc32

ALIGNMENT = 64
_DESCRIPTOR_MARK = b"PK\x07\x08"
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_PADDING_FIELD = struct.Struct("<2sH")
_FLAG_UTF8, _FLAG_DATA_DESCRIPTOR = 0x800, 8
"""Flags of an entry: its name is UTF-8; its checksum follows its content."""

_Entry = tuple[ZipInfo, int | None]
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
        is_large = size > ZIP64_LIMIT
        entry = ZipInfo(name)
        entry.create_system = 0
        entry.header_offset = file.size - self._start
        entry.file_size = entry.compress_size = size
        has_descriptor = isinstance(content, TensorPart) and size > 0
        entry.flag_bits = _FLAG_UTF8 | (_FLAG_DATA_DESCRIPTOR if has_descriptor else 0)
        entry.CRC = crc32(content) if isinstance(content, bytes) else 0
        end = entry.header_offset + len(entry.FileHeader(is_large)) + _PADDING_FIELD.size
        padding = -end % ALIGNMENT
        entry.extra = _PADDING_FIELD.pack(b"FB", padding) + b"Z" * padding
        file.add(entry.FileHeader(is_large))
        entry.extra = b""  # the directory does not repeat the padding
        if isinstance(content, TensorPart) and has_descriptor:
            checksum_index = file.add_with_checksum(content)
            file.add(_make_descriptor(checksum_index, size))
            self._entries.append((entry, checksum_index))
        else:
            file.add(content)
            self._entries.append((entry, None))

    def close(self) -> None:
        """Append the central directory, and the records that say where it is."""
        encode = partial(_encode_directory, self._entries, self._file.size - self._start)
        self._file.add(BytesFromChecksums(len(encode(None)), encode))


def _make_descriptor(checksum_index: int, size: int) -> BytesFromChecksums:
    layout = _DESCRIPTOR64 if size > ZIP64_LIMIT else _DESCRIPTOR
    return BytesFromChecksums(
        layout.size, lambda sums: layout.pack(_DESCRIPTOR_MARK, sums[checksum_index], size, size)
    )


def _encode_directory(entries: Sequence[_Entry], start: int, sums: RangeChecksums | None) -> bytes:
    """Return the central directory and the records at the end of an archive.

    Args:
        entries: the entries.
        start: the offset of the directory in the archive.
        sums: the checksums; None for a placeholder of the same size.
    """
    end = _EndOfFile(start)
    with ZipFile(end, "w") as archive:  # writes the directory when it is closed
        for entry, checksum_index in entries:
            if sums is not None and checksum_index is not None:
                entry.CRC = sums[checksum_index]
            archive.filelist.append(entry)
    return end.getvalue()


class _EndOfFile(io.BytesIO):
    """The bytes of a file from an offset on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def tell(self) -> int:
        return self._start + super().tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._start + super().seek(offset - (0 if whence else self._start), whence)
