"""Read data files, and verify the checksum of each block that is read."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress

from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    StoreError,
    StoreUnavailableError,
)
from shardwise.kernel.events import format_count
from shardwise.kernel.manifest.checksums import BLOCK, BlockTable, crc32
from shardwise.kernel.manifest.layout import StoredFile
from shardwise.kernel.manifest.manifest import ALIGNMENT, FileEntry
from shardwise.kernel.store import (
    CachedFile,
    Files,
    ReadableFile,
    ReplicatedFile,
    Store,
    ViewableFile,
)
from shardwise.kernel.store.store import Buffer

LARGEST_ELEMENT = 16
"""The size of the largest element of any dtype, in bytes."""

log = logging.getLogger("shardwise")


def end_of_read(file: StoredFile, high: int) -> int:
    """Return the end of the bytes that a read up to `high` returns; see `DataReader`."""
    return high if file.entry is not None else min(high + LARGEST_ELEMENT, file.size)


class DataReader:
    """An open data file whose blocks are verified as they are read.

    Args:
        store: the files of the checkpoint.
        file: the file. A data file of shardwise ends with a table of checksums. Another file has
            no table, and may not align its elements to blocks. If a float64 starts 3 bytes before
            the end of a read, the read must include 5 more bytes, so each read of such a file is
            `LARGEST_ELEMENT` bytes longer.
        verify: check the checksum of each block.

    Raises:
        CheckpointNotFoundError: the checkpoint was removed or replaced meanwhile.
        CorruptionError: the file is missing or has another size, or its checksums were altered.
        StoreUnavailableError: the storage does not answer, which says nothing about the file.
    """

    def __init__(self, store: Files, file: StoredFile, *, verify: bool = True) -> None:
        self._stored, self._entry = file, file.entry
        self._store = store
        self._label = f"{file.name} in {store}"
        try:
            self._file: ReadableFile = store.open(file.name)
        except FileNotFoundError as error:
            self._refuse_removed(error)
            raise CorruptionError(
                f"{self._label}: the file is missing: copy it from an intact source, or load "
                "another checkpoint"
            ) from error
        except StoreUnavailableError:
            raise
        except StoreError as error:
            raise CorruptionError(
                f"{self._label} cannot be opened: {error}; copy it again from an intact source"
            ) from error
        # These checks take as long as a checksum, so they are made only once.
        self._viewable = self._file if isinstance(self._file, ViewableFile) else None
        self._cached = self._file if isinstance(self._file, CachedFile) else None
        self._copies = range(self._file.copies if isinstance(self._file, ReplicatedFile) else 0)
        self._table: BlockTable | None = None
        self._verifies = verify
        try:
            if self._file.size != file.size and not self._has_copy_of(file.size):
                raise CorruptionError(
                    f"{self._label} has {self._file.size} bytes, but {file.size} were saved: "
                    "the file was truncated or replaced; copy it again from an intact source"
                )
            if verify and self._entry is not None:
                self._table = self._read_table(self._entry)
        except BaseException:
            self._file.close()
            raise

    def _refuse_removed(self, error: OSError) -> None:
        """Raise if the checkpoint's manifest is gone, or belongs to another save."""
        if self._entry is None or not isinstance(self._store, Store):
            return
        try:
            manifest = CheckpointDirectory(self._store).manifest()
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{self._store} was removed by retention, `shardwise rm` or another program before "
                "all of it was read: load another step, and keep steps that are read for long"
            ) from error
        except (FormatError, StoreError):
            return
        if all(file.name != self._entry.name for file in manifest.files):
            raise CheckpointNotFoundError(
                f"{self._store} was replaced by another save (overwrite=True) before all of it was "
                "read: load it again"
            ) from error

    def _has_copy_of(self, size: int) -> bool:
        """Return whether one of the copies of the file has this size in bytes."""
        for number in self._copies:
            with suppress(OSError, CorruptionError):
                if isinstance(self._file, ReplicatedFile) and self._file.copy_size(number) == size:
                    return True
        return False

    def read(
        self,
        low: int,
        high: int,
        buffer: Buffer,
        *,
        in_place: bool = False,
        target: Buffer | None = None,
    ) -> Buffer:
        """Read and verify bytes `low:high`, which are whole blocks.

        Args:
            low, high: offsets in the file, in bytes.
            buffer: memory for the bytes.
            in_place: if the file is in memory, return its bytes without a copy.
            target: the memory where bytes `low:high` are needed. If the file is in the page cache,
                they are read straight into this memory, and verified there. If they are damaged,
                damaged bytes are left there.

        Returns:
            The bytes: in `buffer`, or in place, or `target` itself.

        Raises:
            CorruptionError: bytes differ from the saved bytes.
        """
        cached, needed = self._cached, high - low
        high = end_of_read(self._stored, high)
        try:
            if in_place and self._viewable is not None:
                return self.verify(low, self._viewable.view(low, high - low))
            if target is not None and cached is not None and cached.is_cached(low, needed):
                self._fill(low, low + needed, target)
                return self.verify(low, target)
            self._fill(low, high, buffer)
            return self.verify(low, buffer[: high - low])
        except CorruptionError as error:
            intact = self._other_copy(low, high, buffer)
            if intact is None:
                intact = self._combine_copies(low, high, buffer)
            if intact is None:
                raise
            log.warning("%s; an intact copy of the file was read instead", error)
            return intact

    def _other_copy(self, low: int, high: int, buffer: Buffer) -> Buffer | None:
        """Return bytes `low:high` from the first intact copy of the file; None if all are bad."""
        for copy in self._copies:
            with suppress(CorruptionError, OSError):
                self._fill(low, high, buffer, copy)
                return self.verify(low, buffer[: high - low])
        return None

    def _combine_copies(self, low: int, high: int, buffer: Buffer) -> Buffer | None:
        """Return bytes `low:high`, each block from an intact copy; None if a block has none.

        Each copy may be damaged in other blocks, so the blocks are read one by one.
        """
        block = aligned_buffer(BLOCK)

        def fill(start: int) -> bool:
            stop = min(start + BLOCK, high)
            for copy in self._copies:
                with suppress(CorruptionError, OSError):
                    self._fill(start, stop, block, copy)
                    buffer[start - low : stop - low] = self.verify(start, block[: stop - start])
                    return True
            return False

        return buffer[: high - low] if all(map(fill, range(low, high, BLOCK))) else None

    def checksum(self, data: Buffer) -> int:
        """Return the checksum to pass with these bytes to other ranks.

        If the file itself has checksums, the other rank verifies those, and the result is 0.
        """
        return crc32(data) if self._verifies and self._entry is None else 0

    def verify_shared(self, low: int, high: int, buffer: Buffer, checksum: int) -> Buffer:
        """Verify bytes `low:high`, which another rank has read, in shared memory.

        Args:
            low, high: as for `read`.
            buffer: the shared memory.
            checksum: the checksum from the other rank; see `checksum`.

        Raises:
            CorruptionError: the bytes differ from those that were saved, or from those that the
                other rank read.
        """
        data = buffer[: end_of_read(self._stored, high) - low]
        if self.checksum(data) != checksum:
            raise CorruptionError(
                f"{self._label}: bytes {low}:{high} were changed after they were read, in shared "
                "memory or between nodes; load again, and test the memory of this node and of the "
                "node that read them"
            )
        return self.verify(low, data)

    def _fill(self, low: int, high: int, buffer: Buffer, copy: int | None = None) -> None:
        """Read from the file's copy with this index, or from the first copy that can be read."""
        out = buffer[: min(-(-(high - low) // ALIGNMENT) * ALIGNMENT, len(buffer))]
        try:
            if copy is not None and isinstance(self._file, ReplicatedFile):
                count = self._file.read_copy(copy, low, out)
            else:
                count = self._file.read_at(low, out)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                self._refuse_removed(error)
            if error.errno != errno.EIO:
                raise
            raise CorruptionError(
                f"{self._label} cannot be read at byte {low}, because the disk reports an "
                "error; load another checkpoint or copy"
            ) from error
        if count < high - low:
            raise CorruptionError(
                f"{self._label}: expected data up to byte {high}, but the file ends at byte "
                f"{low + count}: it was truncated; copy it again"
            )

    def verify(self, low: int, data: Buffer) -> Buffer:
        """Check the checksums of whole blocks, and return them.

        Args:
            low: the offset of the first block in the file, in bytes.
            data: the blocks.

        Raises:
            CorruptionError: blocks differ from those that were saved.
        """
        high = low + len(data)
        if self._table is not None:
            damaged = self._table.find_damaged(low // BLOCK, data)
            if damaged:
                first, last = low + damaged[0] * BLOCK, min(low + (damaged[-1] + 1) * BLOCK, high)
                raise CorruptionError(
                    f"{self._label}: bytes {first}:{last} differ from those that were saved "
                    f"({format_count(len(damaged), 'block')} with wrong checksums); copy the file "
                    "again from an intact source, or load another checkpoint"
                )
        return data

    def read_objects(self) -> bytes:
        """Read and verify the encoded per-rank values of the rank that wrote this data file."""
        if self._entry is None:
            return b""
        low, high = self._entry.objects_at, self._entry.checksums_at
        first = low // BLOCK * BLOCK
        buffer = aligned_buffer(-(-(high - first) // ALIGNMENT) * ALIGNMENT)
        return self.read(first, high, buffer)[low - first :].tobytes()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_table(self, entry: FileEntry) -> BlockTable:
        """Read the checksums from the first copy of the file that has those of the manifest."""
        try:
            return self._table_in(entry, None)
        except (CorruptionError, OSError):
            for copy in self._copies:
                with suppress(CorruptionError, OSError):
                    return self._table_in(entry, copy)
            raise

    def _table_in(self, entry: FileEntry, copy: int | None) -> BlockTable:
        low = entry.checksums_at // ALIGNMENT * ALIGNMENT
        buffer = aligned_buffer(-(-(entry.size - low) // ALIGNMENT) * ALIGNMENT)
        self._fill(low, entry.size, buffer, copy)
        encoded = buffer[entry.checksums_at - low : entry.size - low]
        if crc32(encoded) != entry.checksums_crc32:
            raise CorruptionError(
                f"{self._label}: its checksums differ from those in the manifest, because the file "
                "was altered or belongs to another save; copy it again from an intact source"
            )
        return BlockTable(encoded.view("<u4"))
