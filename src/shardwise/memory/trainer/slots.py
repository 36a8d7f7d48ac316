"""Slots: files in a memory file system that are allocated and mapped once, and reused."""

from __future__ import annotations

import fnmatch
import mmap
import os
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.engine.buffers import allocate_pages, map_pages
from shardwise.errors import StoreError
from shardwise.memory.home import Run
from shardwise.store.store import Buffer

ROOM = 1 << 20  # headers and plain values vary a little from save to save
PAGE = mmap.PAGESIZE
BLOCK = 512  # of st_blocks
SOON, POLL = 1.5, 0.02


@dataclass(frozen=True, slots=True)
class Slot:
    """The memory of one file: `buffer` maps `path`. The file is called `name` while it is free."""

    name: str
    path: Path
    buffer: Buffer


class Locks(Protocol):
    """Page-locks memory, so that devices can copy to it directly."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock memory, and return whether that succeeded."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock the memory that was locked at this address."""
        ...


@dataclass(slots=True)
class _Mapping:
    """A mapped file.

    Attributes:
        buffer: the mapping.
        lasting: how many of the first bytes have had the same pages since they were mapped. A
            device copies to these pages only: data copied to pages that the file has lost is lost.
        asked: whether page-locking was tried.
        locked: whether the memory is page-locked.
    """

    buffer: Buffer
    lasting: int
    asked: bool = False
    locked: bool = False

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
        named_by: a part of the names of the records that say which slots are in use.
        count: the number of slots, including those in use.
        locks: page-locks slots that devices copy to.
    """

    def __init__(
        self, run: Run, prefix: str, named_by: str, count: int, locks: Locks | None = None
    ) -> None:
        self._run = run
        self._directory = run.free
        self._prefix = prefix
        self._records = f"r{prefix[1:]}*.{named_by}*.json"
        self._count = count
        self._locks = locks
        self._maps: dict[int, _Mapping] = {}

    def prepare(self, nbytes: int, *, locked: int = 0, for_others: int = 0) -> int:
        """Allocate missing slots, make each large enough, and return the bytes allocated.

        Args:
            nbytes: the size of the files that the slots are for.
            locked: how many of the first bytes of each slot a device copies to.
            for_others: how many bytes must remain free for other purposes.

        Raises:
            StoreError: the memory file system is too small; says what is needed.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        size = _rounded(nbytes + ROOM)
        wanted = self._free()
        wanted += [self._new_name() for _ in range(self._lacking())]
        small = [name for name in wanted if self._size(name) < nbytes]
        needed = sum(max(0, size - self._allocated(name)) for name in small)
        if self._lacks(needed + for_others):
            raise self._too_small(size, needed, for_others)
        for name in wanted:
            if name in small:
                self._allocate(self._directory / name, size)
            self._map(self._directory / name, locked)
        if self._lacks(for_others):  # other ranks have allocated theirs meanwhile
            raise self._too_small(size, 0, for_others)
        return needed

    def has_free(self) -> bool:
        """Whether a slot is free, or can be allocated."""
        return bool(self._free()) or self._lacking() > 0

    def take(self, nbytes: int, *, excluding: Collection[str] = (), locked: int = 0) -> Slot | None:
        """Return a free slot, resized to this many bytes; None if no slot is free.

        The file stays in the directory of free slots until the caller has filled it and moves it to
        its place. So a trainer that is killed leaves behind a free slot.

        Args:
            nbytes: the size of the file.
            excluding: the names of slots that are already being filled.
            locked: how many of the first bytes a device copies to.

        Raises:
            StoreError: the memory file system is full.
        """
        names = [name for name in self._free() if name not in excluding]
        if not names and self._lacking() > 0:  # the record that names it is damaged
            names = [self._new_name()]
        if not names:
            return None
        largest = max(names, key=self._size)
        path = self._directory / largest
        if self._size(largest) < nbytes:
            self._allocate(path, _rounded(nbytes))
        mapping = self._map(path, locked)
        os.truncate(path, nbytes)
        mapping.lasting = min(mapping.lasting, _rounded(nbytes))
        return Slot(largest, path, mapping.buffer[:nbytes])

    def remove(self) -> None:
        """Delete the free slots."""
        for name in self._free():
            (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all slots. The files stay."""
        for inode in list(self._maps):
            self._unmap(inode)

    def _free(self) -> list[str]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.startswith(self._prefix))

    def _in_use(self) -> int:
        used = 0
        for step in self._run.steps():
            with suppress(FileNotFoundError):  # reclaimed meanwhile
                used += len(fnmatch.filter(os.listdir(self._run.step(step)), self._records))
        return used

    def _lacking(self) -> int:
        """Return how many slots are missing."""
        in_use = self._in_use()  # before the free ones, so that none is missed
        return self._count - in_use - len(self._free())

    def _new_name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(4)}.slot"

    def _size(self, name: str) -> int:
        """Return the size of a slot; 0 if some of its pages were never allocated."""
        try:
            found = (self._directory / name).stat()
        except FileNotFoundError:
            return 0
        return found.st_size if found.st_blocks * BLOCK >= found.st_size else 0

    def _allocated(self, name: str) -> int:
        """Return the bytes that are allocated to a slot."""
        try:
            return (self._directory / name).stat().st_blocks * BLOCK
        except FileNotFoundError:
            return 0

    def _lacks(self, nbytes: int) -> bool:
        """Whether there is too little space. Waits a moment for files that agents have deleted."""
        stat = os.statvfs(self._directory)
        soon = SOON if nbytes <= stat.f_blocks * stat.f_frsize else 0.0
        deadline = time.monotonic() + soon
        while nbytes > self._available():
            if time.monotonic() > deadline:
                return True
            time.sleep(POLL)
        return False

    def _available(self) -> int:
        stat = os.statvfs(self._directory)
        return stat.f_bavail * stat.f_frsize

    def _allocate(self, path: Path, size: int) -> None:
        """Allocate the pages of a file, so that later writes neither fail nor wait for them.

        If there are too few, the file is unchanged.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        before = os.fstat(fd).st_size
        try:
            os.ftruncate(fd, size)
            allocate_pages(fd, size)
        except OSError as error:
            os.ftruncate(fd, before)
            if not before:
                path.unlink(missing_ok=True)
            raise self._too_small(size, size - before) from error
        finally:
            os.close(fd)

    def _map(self, path: Path, locked: int) -> _Mapping:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            inode, size = found.st_ino, found.st_size
            known = self._maps.get(inode)
            if known is None or len(known.buffer) < size or known.lasting < locked:
                self._unmap(inode)
                buffer = map_pages(fd, 0, size, writable=True, now=True)
                known = self._maps[inode] = _Mapping(buffer, _rounded(size))
        finally:
            os.close(fd)
        if locked and self._locks is not None and not known.asked:
            known.asked = True
            known.locked = self._locks.lock(known.address, len(known.buffer))
        return known

    def _unmap(self, inode: int) -> None:
        known = self._maps.pop(inode, None)
        if known is not None and known.locked and self._locks is not None:
            self._locks.unlock(known.address)

    def _too_small(self, size: int, needed: int, for_others: int = 0) -> StoreError:
        others = f"the data that its node stores for others needs {for_others:,} more, and "
        return StoreError(
            f"{self._directory} has {self._available():,} bytes left; "
            f"{others if for_others else ''}"
            f"{self._count} slots of {size:,} bytes for this rank need {needed:,} more: make it "
            "larger (in containers --shm-size, otherwise mount -o remount,size=…), use fewer slots "
            "or another directory with Memory(slots=…, dir=…), or save without snapshots in memory "
            "with memory=None"
        )


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
