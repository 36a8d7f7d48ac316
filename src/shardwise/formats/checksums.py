"""Read the checksums in foreign files: the CRC-32 of entries of zip archives.

A data file of DCP consists of many archives.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.formats.containers.zip_archive import ZIP_START, read_entry_checksums
from shardwise.formats.file_tree import ForeignFiles
from shardwise.manifest.checksums import FileChecksums
from shardwise.manifest.layout import Layout
from shardwise.store import Files


def checksums_of(store: Files, layout: Layout) -> Iterator[FileChecksums]:
    """Yield the checksums in the files of a foreign checkpoint: the CRC-32s of zip archives.

    Yield nothing if the checkpoint is not foreign, and an empty table for a file that is no zip.

    Args:
        store, layout: the checkpoint, as `open_any` returns it.

    Raises:
        FormatError: an archive is malformed or truncated.
    """
    if not isinstance(store, ForeignFiles):
        return
    for name in (file.name for file in layout.files if file.content is None):
        with store.tree.open_range(name) as file:
            rows = []
            if file.read(0, min(len(ZIP_START), file.size)) == ZIP_START:
                entries = read_entry_checksums(file)
                rows = [(start, size, crc) for start, size, crc in entries if crc and size]
        table = np.array(rows, np.int64)
        yield FileChecksums(name, table.reshape(len(table), 3))
