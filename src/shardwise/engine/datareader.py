"""Read data files, and verify each block that is read."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress

from shardwise.engine.buffers import aligned_buffer
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, BlockTable, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.store import Files, MappedFile, ReadableFile, ReplicatedFile
from shardwise.store.store import Buffer

ALIGNMENT = 4096
BEYOND = 16
"""The size of the largest element in bytes."""

log = logging.getLogger("shardwise")


class DataReader:
    """An open data file whose blocks are verified as they are read.

    Args:
        store: the files of the checkpoint.
        entry: the file's entry in the manifest.
        verify: check the checksum of each block.
        has_checksums: whether a table of checksums ends the file. Files of foreign checkpoints
            have no table. Reads of them end `BEYOND` bytes later, because an element may begin in
            one read and end in the next.

    Raises:
        CorruptionError: the file is missing, has another size, or has altered checksums.
    """

    def __init__(
        self, store: Files, entry: FileEntry, *, verify: bool = True, has_checksums: bool = True
    ) -> None:
        self.entry = entry
        self._where = f"{entry.name} in {store}"
        try:
            self._file: ReadableFile = store.open(entry.name)
        except FileNotFoundError as error:
            raise CorruptionError(f"{self._where} is missing, but the manifest lists it") from error
        except StoreError as error:
            raise CorruptionError(str(error)) from error
        self._mapped = self._file if isinstance(self._file, MappedFile) else None
        self._table: BlockTable | None = None
        self._verifies = verify
        self._has_checksums = has_checksums
        try:
            if self._file.size != entry.size:
                raise CorruptionError(
                    f"{self._where} has {self._file.size} bytes, but {entry.size} were saved: "
                    "the file was truncated or replaced"
                )
            if verify and has_checksums:
                self._table = self._read_table()
        except BaseException:
            self._file.close()
            raise

    def read(self, low: int, high: int, buffer: Buffer) -> Buffer:
        """Read bytes `low:high`, which are whole blocks, into `buffer`, and verify them.

        Raises:
            CorruptionError: they differ from the bytes that were saved.
        """
        high = self._end(high)
        self._fill(low, high, buffer)
        try:
            return self.verify(low, buffer[: high - low])
        except CorruptionError as error:
            intact = self._other_copy(low, high, buffer)
            if intact is None:
                raise
            log.warning("%s; an intact copy was read instead", error)
            return intact

    def _other_copy(self, low: int, high: int, buffer: Buffer) -> Buffer | None:
        """Return bytes `low:high` from the first intact copy of the file; None if there is none."""
        file = self._file
        for number in range(file.copies if isinstance(file, ReplicatedFile) else 0):
            with suppress(CorruptionError, OSError):
                self._fill(low, high, buffer, number)
                return self.verify(low, buffer[: high - low])
        return None

    def checksum(self, data: Buffer) -> int:
        """Return the checksum to send with these bytes to another rank.

        The result is 0 if the file has checksums, because the other rank checks those.
        """
        return crc32(data) if self._verifies and not self._has_checksums else 0

    def passed_on(self, low: int, high: int, buffer: Buffer, checksum: int) -> Buffer:
        """Verify bytes that another rank has read into `buffer`.

        Args:
            checksum: the checksum that came with them.

        Raises:
            CorruptionError: they differ from the bytes that were saved or that the other rank read.
        """
        data = buffer[: self._end(high) - low]
        if self.checksum(data) != checksum:
            raise CorruptionError(
                f"{self._where}: bytes {low}:{high} were changed in shared memory after they were "
                "read"
            )
        return self.verify(low, data)

    def _end(self, high: int) -> int:
        """Return where a read must end to cover all elements that begin before `high`."""
        return high if self._has_checksums else min(high + BEYOND, self.entry.size)

    def view(self, low: int, high: int, buffer: Buffer) -> Buffer:
        """Read bytes `low:high` like `read`, but return a view if the file is mapped into memory.

        Raises:
            CorruptionError: they differ from the bytes that were saved.
        """
        if self._mapped is not None:
            return self.verify(low, self._mapped.view(low, high - low))
        return self.read(low, high, buffer)

    def _fill(self, low: int, high: int, buffer: Buffer, copy: int | None = None) -> None:
        room = min(-(-(high - low) // ALIGNMENT) * ALIGNMENT, len(buffer))
        count = self._read_at(low, buffer[:room], copy)
        if count < high - low:
            raise CorruptionError(
                f"{self._where}: expected data up to byte {high}, but the file ends at byte "
                f"{low + count}: it was truncated"
            )

    def verify(self, low: int, data: Buffer) -> Buffer:
        """Check the checksums of `data`, whole blocks from byte `low` on, and return `data`.

        Raises:
            CorruptionError: they differ from the bytes that were saved.
        """
        high = low + len(data)
        if self._table is not None:
            bad = self._table.damaged(low // BLOCK, data)
            if bad:
                first, last = low + bad[0] * BLOCK, min(low + (bad[-1] + 1) * BLOCK, high)
                raise CorruptionError(
                    f"{self._where}: bytes {first}:{last} differ from those that were saved "
                    f"({len(bad)} block(s) fail their checksum)"
                )
        return data

    def read_objects(self) -> bytes:
        """Read and verify the encoded per-rank values of the rank that wrote this file."""
        low, high = self.entry.objects_at, self.entry.checksums_at
        first = low // BLOCK * BLOCK
        buffer = aligned_buffer(-(-(high - first) // ALIGNMENT) * ALIGNMENT)
        return self.read(first, high, buffer)[low - first :].tobytes()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_at(self, offset: int, buffer: Buffer, copy: int | None = None) -> int:
        """Read from copy number `copy` of the file, or from the first that can be read."""
        try:
            if copy is not None and isinstance(self._file, ReplicatedFile):
                return self._file.read_copy(copy, offset, buffer)
            return self._file.read_at(offset, buffer)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise CorruptionError(f"{self._where} cannot be read at byte {offset}") from error

    def _read_table(self) -> BlockTable:
        low = self.entry.checksums_at // ALIGNMENT * ALIGNMENT
        buffer = aligned_buffer(-(-(self.entry.size - low) // ALIGNMENT) * ALIGNMENT)
        table = self._table_in(low, buffer)
        for number in range(self._file.copies if isinstance(self._file, ReplicatedFile) else 0):
            if table is None:
                with suppress(CorruptionError, OSError):
                    table = self._table_in(low, buffer, number)
        if table is None:
            raise CorruptionError(
                f"{self._where}: its checksums differ from those in the manifest; the file was "
                "altered, or belongs to another save"
            )
        return table

    def _table_in(self, low: int, buffer: Buffer, copy: int | None = None) -> BlockTable | None:
        """Return the checksums in one copy of the file; None if the manifest has others."""
        count = self._read_at(low, buffer, copy)
        encoded = buffer[self.entry.checksums_at - low : count]
        if crc32(encoded) != self.entry.checksums_crc32:
            return None
        return BlockTable(encoded.view("<u4"))
