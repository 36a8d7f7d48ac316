"""Checksums of staged files, taken by the agent where the training does not wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shardwise.errors import CorruptionError
from shardwise.manifest.checksums import BLOCK, BlockTable, block_checksums, block_count, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import records
from shardwise.memory.node.home import write_record
from shardwise.memory.node.mappings import Mappings, mapped
from shardwise.memory.node.place import Place
from shardwise.store.store import Buffer

AT_A_TIME = 4 << 20


def seal(data: Buffer, entry: FileEntry) -> FileEntry:
    """Write a staged file's checksums to its end; its entry, with the checksum of these.

    By one thread: blocks are so small that several would wait for each other all the time.

    Args:
        data: the file, mapped.
    """
    table = np.zeros(block_count(entry.checksums_at), "<u4")
    for low in range(0, entry.checksums_at, AT_A_TIME):
        sums = block_checksums(data[low : min(low + AT_A_TIME, entry.checksums_at)])
        table[low // BLOCK : low // BLOCK + len(sums)] = sums
    encoded = table.view(np.uint8)
    data[entry.checksums_at :] = encoded
    return msgspec.structs.replace(entry, checksums_crc32=crc32(encoded))


def is_intact(path: Path, entry: FileEntry) -> bool:
    """Whether a sealed file is what it was when it was sealed."""
    try:
        return is_sealed(mapped(path, entry.size), entry)
    except (OSError, CorruptionError):
        return False


def is_sealed(data: Buffer, entry: FileEntry) -> bool:
    """The same of a file that is mapped."""
    encoded = data[entry.checksums_at :]
    if crc32(encoded) != entry.checksums_crc32:
        return False
    table = BlockTable(np.frombuffer(encoded.tobytes(), "<u4"))
    return not any(
        table.damaged(low // BLOCK, data[low : min(low + AT_A_TIME, entry.checksums_at)])
        for low in range(0, entry.checksums_at, AT_A_TIME)
    )


@dataclass(frozen=True, slots=True)
class Sealing:
    """The duty of every node towards the files of its ranks.

    Attributes:
        mappings: of these files.
    """

    mappings: Mappings

    def seal(self, place: Place) -> bool:
        """Take the checksums of files that were staged."""
        busy = False
        for staged in place.staged():
            name = staged.file.name
            if not place.has(records.entry(name)):
                data = self.mappings.find(place.path / name, staged.file.size)
                write_record(place.path / records.entry(name), seal(data, staged.file))
                busy = True
        return busy
