"""Slots: files in a memory file system that are allocated and mapped once, and reused."""

from __future__ import annotations

import fnmatch
import mmap
import os
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.deadline import Deadline
from shardwise.engine.buffers import aligned_buffer, allocate_pages, map_pages
from shardwise.errors import StoreError
from shardwise.memory.home import Run
from shardwise.memory.trainer.device import CopyStreams
from shardwise.store.local_files import open_regular
from shardwise.store.store import Buffer

HEADROOM = 1 << 20  # bytes; headers and plain values vary a little from save to save
PAGE_SIZE = mmap.PAGESIZE
STAT_BLOCK = 512  # the unit of st_blocks, in bytes
DELETION_TIMEOUT = 1.5  # seconds to wait for files that agents have deleted


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


class SampleBuffer:
    """Memory of this process for a sample of replicas. It is reused, and grows if necessary.

    Args:
        page_locker: page-locks the memory if devices copy to it.
    """

    def __init__(self, page_locker: CopyStreams) -> None:
        self._page_locker = page_locker
        self._buffer = aligned_buffer(0)
        self._lock_was_tried = self._is_locked = False

    def take(self, nbytes: int, *, locks: bool = False) -> Buffer:
        """Return memory of `nbytes` bytes. The memory that was returned before is invalid.

        Args:
            locks: whether devices copy to the memory.

        Raises:
            OSError: there is not enough memory.
        """
        if len(self._buffer) < nbytes:
            self.close()
            self._buffer = aligned_buffer(_round_to_pages(nbytes))
        if locks and nbytes and not self._lock_was_tried:
            self._lock_was_tried = True
            address = int(self._buffer.ctypes.data)
            self._is_locked = self._page_locker.lock_pages(address, len(self._buffer))
        return self._buffer[:nbytes]

    def close(self) -> None:
        """Free the memory."""
        if self._is_locked:
            self._page_locker.unlock_pages(int(self._buffer.ctypes.data))
        self._buffer = aligned_buffer(0)
        self._lock_was_tried = self._is_locked = False


@dataclass(slots=True)
class _MappedFile:
    """A mapped file.

    Attributes:
        buffer: the mapping.
        mapped_bytes: how many of the first bytes of `buffer` still map pages of the file. After the
            file has shrunk, the later pages are no longer part of the file.
        lock_was_tried: whether page-locking was tried.
        is_locked: whether the memory is page-locked.
    """

    buffer: Buffer
    mapped_bytes: int
    lock_was_tried: bool = False
    is_locked: bool = False

    @property
    def address(self) -> int:
        """The address of the mapping in this process."""
        return int(self.buffer.ctypes.data)


class Slots:
    """The slots of one rank on one node.

    A slot becomes the data file of a snapshot. When the snapshot is reclaimed, the file is moved
    back to the directory of free slots.

    Args:
        run: the directories of the run on this node.
        prefix: the start of the slots' names, which identifies their owner.
        record_stage: the stage in the names of the records that each name a slot in use: "staged"
            or "kept".
        count: the number of slots, including those in use.
        page_locker: page-locks slots that devices copy to.
    """

    def __init__(
        self,
        run: Run,
        prefix: str,
        record_stage: str,
        count: int,
        page_locker: CopyStreams | None = None,
    ) -> None:
        self._run = run
        self._directory = run.free_directory
        self._prefix = prefix
        self._record_pattern = f"r{prefix[1:]}*.{record_stage}*.json"
        self._count = count
        self._page_locker = page_locker
        self._mappings: dict[int, _MappedFile] = {}

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
        names = self._free_names()
        names += [self._new_name() for _ in range(self._missing_count())]
        small = [name for name in names if self._usable_size(name) < nbytes]
        needed = sum(max(0, size - self._allocated_size(name)) for name in small)
        if not self._has_space(needed + leave_free):
            raise self._make_error_of_too_little_memory(size, needed, leave_free)
        for name in names:
            if name in small:
                self._allocate(self._directory / name, size)
            self._map(self._directory / name, device_bytes)
        if not self._has_space(leave_free):  # other ranks have allocated their slots meanwhile
            raise self._make_error_of_too_little_memory(size, 0, leave_free)
        return needed

    def has_free(self) -> bool:
        """Return whether a slot is free, or can be allocated."""
        return bool(self._free_names()) or self._missing_count() > 0

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
        names = [name for name in self._free_names() if name not in excluding]
        if not names and self._missing_count() > 0:  # a slot is lost, as its record was damaged
            names = [self._new_name()]
        if not names:
            return None
        largest = max(names, key=self._usable_size)
        path = self._directory / largest
        if self._usable_size(largest) < nbytes:
            self._allocate(path, _round_to_pages(nbytes))
        mapping = self._map(path, device_bytes)
        os.truncate(path, nbytes)
        mapping.mapped_bytes = min(mapping.mapped_bytes, _round_to_pages(nbytes))
        return Slot(largest, path, mapping.buffer[:nbytes])

    def remove(self) -> None:
        """Delete the free slots."""
        for name in self._free_names():
            (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all slots. The files stay."""
        for inode in list(self._mappings):
            self._unmap(inode)

    def _free_names(self) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            files = [each.name for each in entries if each.is_file(follow_symlinks=False)]
            return sorted(name for name in files if name.startswith(self._prefix))
        return []

    def _used_count(self) -> int:
        count = 0
        for step in self._run.steps():
            with suppress(FileNotFoundError):  # reclaimed meanwhile
                names = os.listdir(self._run.step_path(step))
                count += len(fnmatch.filter(names, self._record_pattern))
        return count

    def _missing_count(self) -> int:
        """Return how many slots must be allocated. It may be negative."""
        used = self._used_count()  # first, so that a slot freed meanwhile is not overlooked
        return self._count - used - len(self._free_names())

    def _new_name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(4)}.slot"

    def _usable_size(self, name: str) -> int:
        """Return the size of a slot; 0 if some of its pages were never allocated."""
        try:
            status = (self._directory / name).stat()
        except FileNotFoundError:
            return 0
        return status.st_size if status.st_blocks * STAT_BLOCK >= status.st_size else 0

    def _allocated_size(self, name: str) -> int:
        """Return the bytes that are allocated to a slot."""
        try:
            return (self._directory / name).stat().st_blocks * STAT_BLOCK
        except FileNotFoundError:
            return 0

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
        fd = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        before = os.fstat(fd).st_size
        try:
            os.ftruncate(fd, size)
            allocate_pages(fd, size)
        except OSError as error:
            os.ftruncate(fd, before)
            if not before:
                path.unlink(missing_ok=True)
            raise self._make_error_of_too_little_memory(size, size - before) from error
        finally:
            os.close(fd)

    def _map(self, path: Path, device_bytes: int) -> _MappedFile:
        """Map a file unless it is mapped already, and page-lock the memory if a device uses it."""
        fd = open_regular(path, os.O_RDWR)
        try:
            status = os.fstat(fd)
            inode, size = status.st_ino, status.st_size
            mapping = self._mappings.get(inode)
            if mapping is None or len(mapping.buffer) < size or mapping.mapped_bytes < device_bytes:
                self._unmap(inode)
                buffer = map_pages(fd, 0, size, writable=True, populate=True)
                mapping = self._mappings[inode] = _MappedFile(buffer, _round_to_pages(size))
        finally:
            os.close(fd)
        if device_bytes and self._page_locker is not None and not mapping.lock_was_tried:
            mapping.lock_was_tried = True
            mapping.is_locked = self._page_locker.lock_pages(mapping.address, mapping.mapped_bytes)
        return mapping

    def _unmap(self, inode: int) -> None:
        mapping = self._mappings.pop(inode, None)
        if mapping is not None and mapping.is_locked and self._page_locker is not None:
            self._page_locker.unlock_pages(mapping.address)

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


def _round_to_pages(size: int) -> int:
    return -(-size // PAGE_SIZE) * PAGE_SIZE
