"""Data files, verified block by block as they are read."""

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
BEYOND = 16  # the largest element

log = logging.getLogger("shardwise")


def is_foreign(entry: FileEntry) -> bool:
    """Whether this is no file of ours, which has no checksums at its end."""
    return entry.checksums_at == entry.size


class DataReader:
    """An open data file whose blocks are verified as they are read.

    A foreign file, which has no checksums, is read as it is, and `BEYOND` bytes further: an
    element of it may begin in one read and end in the next.

    Raises:
        CorruptionError: the file is missing, of another size, or its checksums were altered.
    """

    def __init__(self, store: Files, entry: FileEntry, *, verify: bool = True) -> None:
        self.entry = entry
        self._where = f"{entry.name} in {store}"
        try:
            self._file: ReadableFile = store.open(entry.name)
        except FileNotFoundError as error:
            raise CorruptionError(f"{self._where} is missing; the manifest names it") from error
        except StoreError as error:
            raise CorruptionError(str(error)) from error
        self._mapped = self._file if isinstance(self._file, MappedFile) else None
        self._table: BlockTable | None = None
        self._verifies = verify
        try:
            if self._file.size != entry.size:
                raise CorruptionError(
                    f"{self._where} has {self._file.size} bytes where {entry.size} were saved: "
                    "it was cut off, or replaced"
                )
            if verify and not is_foreign(entry):
                self._table = self._read_table()
        except BaseException:
            self._file.close()
            raise

    def read(self, low: int, high: int, buffer: Buffer) -> Buffer:
        """Bytes `low:high`, which are whole blocks, in `buffer`; verified.

        Raises:
            CorruptionError: they are not the bytes that were saved.
        """
        high = self._end(high)
        self._fill(low, high, buffer)
        try:
            return self.verify(low, buffer[: high - low])
        except CorruptionError as error:
            intact = self._other_copy(low, high, buffer)
            if intact is None:
                raise
            log.warning("%s; another copy of them is intact, and was read instead", error)
            return intact

    def _other_copy(self, low: int, high: int, buffer: Buffer) -> Buffer | None:
        """The same bytes from the first copy of the file in which they are intact, if any."""
        file = self._file
        for number in range(file.copies if isinstance(file, ReplicatedFile) else 0):
            with suppress(CorruptionError, OSError):
                self._fill(low, high, buffer, number)
                return self.verify(low, buffer[: high - low])
        return None

    def checksum(self, data: Buffer) -> int:
        """What goes with bytes that were read from a foreign file when they are passed on; 0 for
        files of ours, which have their checksums."""
        return crc32(data) if self._verifies and is_foreign(self.entry) else 0

    def passed_on(self, low: int, high: int, buffer: Buffer, checksum: int) -> Buffer:
        """The bytes that `read` would put into `buffer`, where another rank has put them; verified.

        Args:
            checksum: what that rank's `checksum` has made of them.

        Raises:
            CorruptionError: they are not the bytes that were saved, or read.
        """
        data = buffer[: self._end(high) - low]
        if self.checksum(data) != checksum:
            raise CorruptionError(
                f"{self._where}: bytes {low}:{high} were changed in shared memory after they were "
                "read"
            )
        return self.verify(low, data)

    def _end(self, high: int) -> int:
        """Where a read ends that is to cover everything up to a byte."""
        return min(high + BEYOND, self.entry.size) if is_foreign(self.entry) else high

    def view(self, low: int, high: int, buffer: Buffer) -> Buffer:
        """The same bytes, where they lie if the file lies in memory; else in `buffer`.

        Raises:
            CorruptionError: they are not the bytes that were saved.
        """
        if self._mapped is not None:
            return self.verify(low, self._mapped.view(low, high - low))
        return self.read(low, high, buffer)

    def _fill(self, low: int, high: int, buffer: Buffer, copy: int | None = None) -> None:
        room = min(-(-(high - low) // ALIGNMENT) * ALIGNMENT, len(buffer))
        count = self._read_at(low, buffer[:room], copy)
        if count < high - low:
            raise CorruptionError(f"{self._where} ends at byte {low + count}, in mid-read")

    def verify(self, low: int, data: Buffer) -> Buffer:
        """The same bytes, which are whole blocks from `low` on, if they are those that were saved.

        Raises:
            CorruptionError: they are not.
        """
        high = low + len(data)
        if self._table is not None:
            bad = self._table.damaged(low // BLOCK, data)
            if bad:
                first, last = low + bad[0] * BLOCK, min(low + (bad[-1] + 1) * BLOCK, high)
                raise CorruptionError(
                    f"{self._where}: bytes {first}:{last} are not those that were saved "
                    f"({len(bad)} block(s) fail their checksum)"
                )
        return data

    def read_objects(self) -> bytes:
        """The encoded per-rank objects of the rank that wrote this file; verified."""
        low, high = self.entry.objects_at, self.entry.checksums_at
        first = low // BLOCK * BLOCK
        buffer = aligned_buffer(-(-(high - first) // ALIGNMENT) * ALIGNMENT)
        return self.read(first, high, buffer)[low - first :].tobytes()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_at(self, offset: int, buffer: Buffer, copy: int | None = None) -> int:
        """Read from one copy of the file; if None, from the first that answers."""
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
                f"{self._where}: its checksums are not those that the manifest knows; "
                "the file was altered, or is that of another save"
            )
        return table

    def _table_in(self, low: int, buffer: Buffer, copy: int | None = None) -> BlockTable | None:
        """The checksums in one copy of the file, if they are those that the manifest knows."""
        count = self._read_at(low, buffer, copy)
        encoded = buffer[self.entry.checksums_at - low : count]
        if crc32(encoded) != self.entry.checksums_crc32:
            return None
        return BlockTable(encoded.view("<u4"))
