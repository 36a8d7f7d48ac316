"""Slots: files in a memory file system that are allocated and mapped once, and reused."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.buffers import map_pages
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.files import opened
from shardwise.parts.memory.home import Run
from shardwise.parts.memory.pool import Pool, allocate, owners_of_files, round_to_pages
from shardwise.parts.memory.times import DELETION_TIMEOUT
from shardwise.parts.memory.trainer.device import CopyStreams

HEADROOM = 1 << 20  # bytes; headers and plain values vary a little from save to save


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
    """The slots of one rank on one node: files that become its files of snapshots.

    When a snapshot is freed, its files return to the pool of free files.

    Args:
        run: the directories of the run on this node.
        owner: the owner of the free files: `rank-00003` for the data of rank 3, `ring-00003` for
            what it makes for other nodes.
        count: the number of slots, including those in use.
        page_locker: page-locks slots that devices copy to.
    """

    def __init__(
        self, run: Run, owner: str, count: int, page_locker: CopyStreams | None = None
    ) -> None:
        self._run = run
        self._pool = Pool(run.free_directory)
        self._owner = owner
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
        size = slot_size(nbytes)
        self._pool.directory.mkdir(parents=True, exist_ok=True)
        free = self._pool.files(self._owner)
        small = [(allocated, path) for allocated, path in free if allocated < nbytes]
        new = [(0, self._pool.new_path(self._owner)) for _ in range(self._missing_count())]
        # A small slot keeps the pages that it has: only the missing ones are allocated.
        needed = sum(size - allocated for allocated, _ in (*small, *new))
        if not self._has_space(needed + leave_free):
            raise self._make_error_of_too_little_memory(size, needed, leave_free)
        for _, path in (*small, *new):
            self._allocate(path, size)
        for _, path in (*free, *new):
            self._map(path, device_bytes)
        if not self._has_space(leave_free):  # other ranks have allocated their slots meanwhile
            raise self._make_error_of_too_little_memory(size, 0, leave_free)
        return needed

    def has_free(self) -> bool:
        """Return whether a slot is free, or can be allocated."""
        return bool(self._pool.files(self._owner)) or self._missing_count() > 0

    def take(self, path: Path, nbytes: int, *, device_bytes: int = 0) -> Buffer | None:
        """Move a free slot to `path`, and return its memory; None if no slot is free.

        The agent may map the file at once, so it gets its size before.

        Args:
            nbytes: the size that the file gets.
            device_bytes: how many of the first bytes of the slot a device copies to.

        Raises:
            StoreError: the memory file system is full, or the snapshot was freed.
        """
        slot = next(iter(self._pool.in_order(self._owner, nbytes)), None)
        if slot is None and self._missing_count() > 0:
            # A slot is lost, as its record was damaged; or the rank had nothing to save before.
            slot = self._pool.new_path(self._owner)
        if slot is None:
            return None
        size = round_to_pages(nbytes)
        self._allocate(slot, size)
        mapping = self._map(slot, device_bytes)
        os.truncate(slot, nbytes)
        mapping.mapped_bytes = min(mapping.mapped_bytes, size)
        try:
            slot.rename(path)
        except FileNotFoundError as error:
            raise StoreError(f"{path.parent} was freed before it was filled: save again") from error
        return mapping.buffer[:nbytes]

    def give(self, path: Path) -> None:
        """Return a slot that was not filled, if it exists."""
        with suppress(FileNotFoundError):
            self._pool.give(self._owner, path)

    def close(self) -> None:
        """Unmap all slots. The files stay."""
        for inode in list(self._mappings):
            self._unmap(inode)

    def _missing_count(self) -> int:
        """Return how many slots must be allocated. It may be negative."""
        # A slot moves from a snapshot to a directory that is being freed, and then to the pool. In
        # this order, one that moves meanwhile may be counted twice, but is never missed.
        snapshots = self._run.snapshots(abandoned=True)
        used = sum(self._used_in(each.path) for each in snapshots)
        used += sum(map(self._used_in, self._run.freed_directories()))
        return self._count - used - len(self._pool.files(self._owner))

    def _used_in(self, directory: Path) -> int:
        """Return how many slots are files of a snapshot, or of one that is being freed."""
        return list(owners_of_files(directory).values()).count(self._owner)

    def _has_space(self, nbytes: int) -> bool:
        """Return whether this many bytes are free; wait briefly for files that agents delete."""
        stat = os.statvfs(self._run.path)
        can_ever_fit = nbytes <= stat.f_blocks * stat.f_frsize
        deadline = Deadline(DELETION_TIMEOUT if can_ever_fit else 0.0)
        return any(nbytes <= self._available_bytes() for _ in deadline.attempts())

    def _available_bytes(self) -> int:
        stat = os.statvfs(self._run.path)
        return stat.f_bavail * stat.f_frsize

    def _allocate(self, path: Path, size: int) -> None:
        try:
            allocate(path, size)
        except OSError as error:
            before = path.stat().st_size if path.exists() else 0
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
                mapping = self._mappings[inode] = _Mapping(buffer, round_to_pages(size))
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
            f"{self._run.path} has {self._available_bytes():,} bytes left; "
            f"{others if leave_free else ''}"
            f"{self._count} slots of {size:,} bytes for this rank need {needed:,} more: make the "
            "file system larger (in containers --shm-size, otherwise mount -o remount,size=…), use "
            "fewer slots or another directory with Memory(slots=…, dir=…), or save without "
            "snapshots in memory with memory=None"
        )


def slot_size(nbytes: int) -> int:
    """Return the bytes that `Slots.prepare` allocates to a slot for a file of `nbytes` bytes."""
    return round_to_pages(nbytes + HEADROOM)
