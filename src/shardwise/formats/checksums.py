"""Checksums in foreign files: the CRC-32 of entries of zip archives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.zip_archive import START, read_sums
from shardwise.formats.readers.dcp.metadata import METADATA, read_metadata
from shardwise.formats.tree import Tree
from shardwise.manifest.checksums import Summed

OF_ITEMS = ".distcp"
"""The suffix of DCP's files, which contain an archive for each item listed in the metadata."""

_Ranges = dict[str, list[tuple[int, int]]]


def sums_of(tree: Tree, names: Iterable[str]) -> Iterator[Summed]:
    """Yield the checksums of ranges of each file. A file without checksums has no ranges.

    Raises:
        FormatError: an archive is malformed or cut off.
    """
    folders: dict[str, _Ranges] = {}
    for name in names:
        folder, _, base = name.rpartition("/")
        with tree.open_range(name) as whole:
            parts = [whole]
            if name.endswith(OF_ITEMS):
                items = folders.setdefault(folder, _items(tree, folder))
                places = items.get(base, [])
                parts = [whole.within(at, size, f"an item at {at}") for at, size in places]
            rows = [row for part in parts for row in _rows(part)]
        yield Summed(name, np.array(rows, np.int64).reshape(len(rows), 3))


def _rows(part: FileRange) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of the file and their checksums, if it is a zip archive."""
    if part.read(0, min(len(START), part.size)) != START:
        return
    for entry, crc32 in read_sums(part):
        if entry.size and crc32:
            yield part.offset + entry.start, entry.size, crc32


def _items(tree: Tree, folder: str) -> _Ranges:
    """Return the ranges of the items in each file."""
    found: dict[str, dict[tuple[int, int], None]] = {}
    metadata = read_metadata(tree, f"{folder}/{METADATA}" if folder else METADATA)
    for item in metadata.items.values():
        found.setdefault(item.file, {})[item.offset, item.length] = None
    return {name: sorted(places) for name, places in found.items()}
