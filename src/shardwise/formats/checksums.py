"""Read the checksums in foreign files: the CRC-32 of entries of zip archives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.zip_archive import ZIP_START, read_entry_checksums
from shardwise.formats.file_tree import FileTree
from shardwise.formats.readers.dcp.metadata import METADATA, read_metadata
from shardwise.manifest.checksums import FileChecksums

ITEMS_SUFFIX = ".distcp"
"""The suffix of DCP's files, which contain an archive for each item listed in the metadata."""

_RangesByFile = dict[str, list[tuple[int, int]]]


def read_checksums(tree: FileTree, names: Iterable[str]) -> Iterator[FileChecksums]:
    """Yield the checksums of ranges of each file. A file without checksums has no ranges.

    Raises:
        FormatError: an archive is malformed or truncated.
    """
    item_ranges_of_folder: dict[str, _RangesByFile] = {}
    for name in names:
        folder, _, base_name = name.rpartition("/")
        with tree.open_range(name) as whole:
            ranges = [whole]
            if name.endswith(ITEMS_SUFFIX):
                if folder not in item_ranges_of_folder:
                    item_ranges_of_folder[folder] = _find_item_ranges(tree, folder)
                ranges = [
                    whole.subrange(offset, size, f"the item at {offset}")
                    for offset, size in item_ranges_of_folder[folder].get(base_name, [])
                ]
            rows = [row for file_range in ranges for row in _checksum_rows(file_range)]
        yield FileChecksums(name, np.array(rows, np.int64).reshape(len(rows), 3))


def _checksum_rows(file_range: FileRange) -> Iterator[tuple[int, int, int]]:
    """Yield `(offset, size, crc32)` of the entries of a zip archive; nothing for other files."""
    if file_range.read(0, min(len(ZIP_START), file_range.size)) != ZIP_START:
        return
    for entry, crc32 in read_entry_checksums(file_range):
        if entry.size and crc32:
            yield file_range.offset + entry.start, entry.size, crc32


def _find_item_ranges(tree: FileTree, folder: str) -> _RangesByFile:
    """Return `(offset, size)` of the items in each file of a DCP checkpoint."""
    ranges: dict[str, dict[tuple[int, int], None]] = {}
    metadata = read_metadata(tree, f"{folder}/{METADATA}" if folder else METADATA)
    for item in metadata.items.values():
        ranges.setdefault(item.file, {})[item.offset, item.length] = None
    return {name: sorted(item_ranges) for name, item_ranges in ranges.items()}
