"""Slots: files in a memory file system that are allocated and mapped once, and reused."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.buffers import allocate_pages, map_pages
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.files import opened, regular_files
from shardwise.parts.memory.home import Run
from shardwise.parts.memory.records import RankPart, rank_record
from shardwise.parts.memory.states import RecordCache
from shardwise.parts.memory.times import DELETION_TIMEOUT
from shardwise.parts.memory.trainer.device import CopyStreams

HEADROOM = 1 << 20  # bytes; headers and plain values vary a little from save to save
PAGE_SIZE = mmap.PAGESIZE
STAT_BLOCK = 512  # the unit of st_blocks, in bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """A free slot that a caller fills.

    Attributes:
        name: the name of the file while it is free.
        path: the path of the file.
        buffer: the mapped file.
    """

    name: str
    path: Path
    buffer: Buffer


@dataclass(slots=True)
class _Mapping:
    """Memory that may be page-locked, such as a mapped file.

    Attributes:
        buffer: the memory.
        mapped_bytes: the length of the start of `buffer` that the file still backs. If the file has
            shrunk, the later pages must not be used.
        is_locked: whether the memory is page-locked; None if that was not tried.
    """

    buffer: Buffer
    mapped_bytes: int
    is_locked: bool | None = None

    def lock(self, page_locker: CopyStreams) -> None:
        """Page-lock the memory, unless that was tried before."""
        if self.is_locked is None:
            address = int(self.buffer.ctypes.data)
            self.is_locked = page_locker.lock_pages(address, self.mapped_bytes)

    def unlock(self, page_locker: CopyStreams | None) -> None:
        """Unlock the memory if it is page-locked."""
        if self.is_locked and page_locker is not None:
            page_locker.unlock_pages(int(self.buffer.ctypes.data))


class Slots:
    """The slots of one rank on one node.

    A slot becomes the data file of a snapshot. When the snapshot is reclaimed, the file is moved
    back to the directory of free slots.

    Args:
        run: the directories of the run on this node.
        rank: the rank.
        for_others: whether the slots are for copies and parity of other nodes' files.
        count: the number of slots, including those in use.
        page_locker: page-locks slots that devices copy to.
    """

    def __init__(
        self,
        run: Run,
        rank: int,
        count: int,
        page_locker: CopyStreams | None = None,
        *,
        for_others: bool = False,
    ) -> None:
        self._run = run
        self._directory = run.free_directory
        self._record = rank_record(rank)
        self._for_others = for_others
        self._prefix = f"{'k' if for_others else 'r'}{rank:05d}-"
        self._records = RecordCache()
        self._count = count
        self._page_locker = page_locker
        self._mappings: dict[int, _Mapping] = {}

    def prepare(self, nbytes: int, *, device_bytes: int = 0, leave_free: int = 0) -> int:
        """Allocate missing slots, enlarge small slots, and return the number of bytes allocated.

        Args:
            nbytes: the size of the files that the slots are for.
            device_bytes: how many of the first bytes of each slot a device copies to.
            leave_free: the number of bytes that must remain free for other purposes.

        Raises:
            StoreError: the memory file system is too small. The message says how many bytes are
                missing, and what to do.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        size = slot_size(nbytes)
        free = self._free_slots()
        new = [self._new_name() for _ in range(self._missing_count())]
        small = [name for name, status in free.items() if _usable_size(status) < nbytes]
        # A small slot keeps the pages that it has: only the missing ones are allocated.
        allocated = sum(min(size, free[name].st_blocks * STAT_BLOCK) for name in small)
        needed = size * (len(small) + len(new)) - allocated
        if not self._has_space(needed + leave_free):
            raise self._make_error_of_too_little_memory(size, needed, leave_free)
        for name in (*free, *new):
            if name in small or name in new:
                self._allocate(self._directory / name, size)
            self._map(self._directory / name, device_bytes)
        if not self._has_space(leave_free):  # other ranks have allocated their slots meanwhile
            raise self._make_error_of_too_little_memory(size, 0, leave_free)
        return needed

    def has_free(self) -> bool:
        """Return whether a slot is free, or can be allocated."""
        return bool(self._free_slots()) or self._missing_count() > 0

    def take(
        self, nbytes: int, *, excluding: Collection[str] = (), device_bytes: int = 0
    ) -> Slot | None:
        """Return a free slot, resized to this many bytes; None if no slot is free.

        The file stays in the directory of free slots until the caller has filled it and moves it to
        the snapshot. If the trainer is killed before the move, the slot is still free.

        Args:
            nbytes: the size of the file.
            excluding: the names of slots that are already being filled.
            device_bytes: how many of the first bytes of the slot a device copies to.

        Raises:
            StoreError: the memory file system is full.
        """
        sizes = {
            name: _usable_size(status)
            for name, status in self._free_slots().items()
            if name not in excluding
        }
        if not sizes and self._missing_count() > 0:
            # A slot is lost, as its record was damaged; or the rank had nothing to save before.
            self._directory.mkdir(parents=True, exist_ok=True)
            sizes[self._new_name()] = 0
        if not sizes:
            return None
        largest = max(sizes, key=lambda name: sizes[name])
        path = self._directory / largest
        if sizes[largest] < nbytes:
            self._allocate(path, _round_to_pages(nbytes))
        mapping = self._map(path, device_bytes)
        os.truncate(path, nbytes)
        mapping.mapped_bytes = min(mapping.mapped_bytes, _round_to_pages(nbytes))
        return Slot(largest, path, mapping.buffer[:nbytes])

    def remove(self) -> None:
        """Delete the free slots."""
        for name in self._free_slots():
            (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all slots. The files stay."""
        for inode in list(self._mappings):
            self._unmap(inode)

    def _free_slots(self) -> dict[str, os.stat_result]:
        """Return the free slots, sorted by name."""
        files = regular_files(self._directory)
        return {name: files[name] for name in sorted(files) if name.startswith(self._prefix)}

    def _used_in(self, directory: Path) -> int:
        """Return how many slots are files of a snapshot, or of one that is being freed."""
        with suppress(FileNotFoundError):  # reclaimed meanwhile
            names = os.listdir(directory)
            part = self._records.read(directory / self._record, RankPart)
            if isinstance(part, RankPart):
                own = [] if part.file is None else [{part.file.name}]
                made = [{each.file, each.name, f".{each.name}"} for each in part.made]
                return sum(
                    not each.isdisjoint(names) for each in (made if self._for_others else own)
                )
        return 0

    def _missing_count(self) -> int:
        """Return how many slots must be allocated. It may be negative."""
        # Count in the order in which a slot moves, so that one that moves is not overlooked.
        snapshots = sum(self._used_in(each.path) for each in self._run.snapshots())
        freed = sum(map(self._used_in, self._run.freed_directories()))
        return self._count - snapshots - freed - len(self._free_slots())

    def _new_name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(4)}.slot"

    def _has_space(self, nbytes: int) -> bool:
        """Return whether this many bytes are free; wait briefly for files that agents delete."""
        stat = os.statvfs(self._directory)
        can_ever_fit = nbytes <= stat.f_blocks * stat.f_frsize
        deadline = Deadline(DELETION_TIMEOUT if can_ever_fit else 0.0)
        return any(nbytes <= self._available_bytes() for _ in deadline.attempts())

    def _available_bytes(self) -> int:
        stat = os.statvfs(self._directory)
        return stat.f_bavail * stat.f_frsize

    def _allocate(self, path: Path, size: int) -> None:
        """Allocate the pages of a file, so that later writes neither fail nor wait for them.

        If there are too few pages, the file is unchanged.
        """
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            before = os.fstat(fd).st_size
            try:
                os.ftruncate(fd, size)
                allocate_pages(fd, size)
            except OSError as error:
                os.ftruncate(fd, before)
                if not before:
                    path.unlink(missing_ok=True)
                raise self._make_error_of_too_little_memory(size, size - before) from error

    def _map(self, path: Path, device_bytes: int) -> _Mapping:
        """Map a file unless it is mapped already, and page-lock the memory if a device uses it."""
        with opened(path, os.O_RDWR) as fd:
            status = os.fstat(fd)
            inode, size = status.st_ino, status.st_size
            mapping = self._mappings.get(inode)
            if mapping is None or len(mapping.buffer) < size or mapping.mapped_bytes < device_bytes:
                self._unmap(inode)
                buffer = map_pages(fd, 0, size, writable=True, populate=True)
                mapping = self._mappings[inode] = _Mapping(buffer, _round_to_pages(size))
        if device_bytes and self._page_locker is not None:
            mapping.lock(self._page_locker)
        return mapping

    def _unmap(self, inode: int) -> None:
        if (mapping := self._mappings.pop(inode, None)) is not None:
            mapping.unlock(self._page_locker)

    def _make_error_of_too_little_memory(
        self, size: int, needed: int, leave_free: int = 0
    ) -> StoreError:
        others = f"the data that its node stores for others needs {leave_free:,} more, and "
        return StoreError(
            f"{self._directory} has {self._available_bytes():,} bytes left; "
            f"{others if leave_free else ''}"
            f"{self._count} slots of {size:,} bytes for this rank need {needed:,} more: make the "
            "file system larger (in containers --shm-size, otherwise mount -o remount,size=…), use "
            "fewer slots or another directory with Memory(slots=…, dir=…), or save without "
            "snapshots in memory with memory=None"
        )


def slot_size(nbytes: int) -> int:
    """Return the bytes that `Slots.prepare` allocates to a slot for a file of `nbytes` bytes."""
    return _round_to_pages(nbytes + HEADROOM)


def _usable_size(status: os.stat_result) -> int:
    """Return the size of a slot; 0 if some of its pages were never allocated."""
    is_allocated = status.st_blocks * STAT_BLOCK >= status.st_size
    return status.st_size if is_allocated else 0


def _round_to_pages(size: int) -> int:
    return -(-size // PAGE_SIZE) * PAGE_SIZE
