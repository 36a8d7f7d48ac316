"""Follows a data file that a rank of this node copies into memory, so that it can be stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory import records
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.home import SnapshotDirectory
from shardwise.parts.memory.observe import copying_ranks
from shardwise.parts.memory.rank_liveness import is_rank_alive
from shardwise.parts.memory.records import RankPart
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import read_state
from shardwise.parts.memory.times import POLL_PAUSE


def rank_record_of(place: SnapshotDirectory, data_file: str) -> Path:
    """Return the path of the record of the rank that a data file is of."""
    return place.path / records.rank_record(records.rank_in_name(data_file))


class IncomingFile:
    """A data file that a rank of this node copies into memory, or has copied.

    Args:
        place: the snapshot.
        name: the name of the file.
        wait: seconds to wait for a rank that is not copying, and for the checksums.
        mapped_files: the mappings of this node's files.

    Raises:
        StoreError: the rank has failed, or has not begun in time, or the snapshot is abandoned.

    Attributes:
        entry: the file's entry, without checksums.
        data: the file, mapped. Bytes that the rank has not copied yet are undefined.
    """

    def __init__(
        self, place: SnapshotDirectory, name: str, wait: float, mapped_files: MappedFiles
    ) -> None:
        self._place, self._name, self._wait, self._copied = place, name, wait, 0
        for _ in self._attempts():
            if (found := self._find(mapped_files)) is not None:
                self.entry, self.data = found
                return

    def _find(self, mapped_files: MappedFiles) -> tuple[FileEntry, Buffer] | None:
        """Return the entry and the mapping of the file, which the rank may still be filling."""
        part = self._read_part()
        if part is None or part.file is None:
            return None
        path, copied_to = self._place.path / self._name, self._place.temporary_path(self._name)
        with suppress(FileNotFoundError):  # the rank has no slot yet, or has just renamed it
            found = path if path.exists() else copied_to
            return part.file, mapped_files.map(found, part.file.size)
        return None

    def wait_for(self, nbytes: int) -> None:
        """Wait until the first bytes of the file are final. At its end are the checksums.

        Raises:
            StoreError: as for the constructor; or the rank was lost.
        """
        if self._copied < nbytes:
            for _ in self._attempts():
                if self._place.has(self._name):
                    self._copied = self.entry.size
                elif (part := self._read_part()) is not None:
                    self._copied = part.copied
                if self._copied >= nbytes:
                    break
        if nbytes > self.entry.checksums_at:
            for _ in self._attempts():
                if self._name in read_state(self._place).entries:
                    break

    def _read_part(self) -> RankPart | None:
        """Return the record of the rank.

        Raises:
            StoreError: the record is damaged.
        """
        return read_record(rank_record_of(self._place, self._name), RankPart)

    def _attempts(self) -> Iterator[None]:
        """Yield while live ranks of this node copy, and `wait` seconds longer; and then raise.

        Lost ranks are not waited for, because the agent may have to rescue an older snapshot.
        """
        place, rank = self._place, records.rank_in_name(self._name)
        deadline = Deadline(self._wait)
        while not deadline.has_passed():
            ranks = copying_ranks(place, place.parts(), place.list_names())  # before their files
            is_own_lost = not is_rank_alive(place.run, rank)
            yield
            place.refuse_abandoned()
            part = self._read_part()
            if part is not None and part.failure:
                raise StoreError(part.failure)
            if False in ranks.values() or (is_own_lost and not place.has(self._name)):
                break
            if ranks:
                deadline = Deadline(self._wait)
            time.sleep(POLL_PAUSE)
        raise StoreError(
            f"{place.path / self._name} is incomplete: its rank, or another rank of this node that "
            "copies its part of the save, has ended or is too slow; see their logs, or pass a "
            "larger Memory(wait=…)"
        )
