"""Memory that a rank stages into: allocated, touched and mapped once, and used again and again."""

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

ROOM = 1 << 20  # headers and the values of a rank differ a little from save to save
PAGE = mmap.PAGESIZE
BLOCK = 512  # of st_blocks
SOON, POLL = 1.5, 0.02


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory of one snapshot's file: `buffer` is the file at `path`, called `name` when free."""

    name: str
    path: Path
    buffer: Buffer


class Locks(Protocol):
    """Page-locks memory, so that a device copies to it by itself."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock it; whether that could be."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock what was locked from this address on."""
        ...


@dataclass(slots=True)
class _Mapping:
    """A file as it is mapped.

    Attributes:
        lasting: how many of its first bytes have had the same pages ever since. A device knows no
            others: what it copied to pages that a file has lost would be lost too.
        asked: whether it was to be page-locked.
        locked: whether it is.
    """

    buffer: Buffer
    lasting: int
    asked: bool = False
    locked: bool = False

    @property
    def address(self) -> int:
        """Of its first byte, in this process."""
        return int(self.buffer.ctypes.data)


class Slots:
    """The slots of one rank on one node.

    A slot that is taken becomes the data file of a snapshot; whoever retires the snapshot moves it
    back to where free ones wait.

    Args:
        run: what the node keeps of the run.
        prefix: what their names begin with: whose they are.
        named_by: a word in the names of the records that say which of them are in use.
        count: how many there should be, those in use included.
        locks: page-locks those that a device copies to.
    """

    def __init__(
        self, run: Run, prefix: str, named_by: str, count: int, locks: Locks | None = None
    ) -> None:
        self._run = run
        self._directory = run.free
        self._prefix = prefix
        self._notes = f"r{prefix[1:]}*.{named_by}*.json"
        self._count = count
        self._locks = locks
        self._maps: dict[int, _Mapping] = {}

    def prepare(self, nbytes: int, *, locked: int = 0, for_others: int = 0) -> int:
        """Have as many slots as there should be, each with room for so many bytes.

        Args:
            locked: how many of the first bytes of each a device copies to.
            for_others: the bytes that have to be left beside them.

        Returns:
            The bytes that were allocated.

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
        if self._lacks(for_others):  # by now, other ranks have allocated theirs
            raise self._too_small(size, 0, for_others)
        return needed

    def has_free(self) -> bool:
        """Whether one is free."""
        return bool(self._free()) or self._lacking() > 0

    def take(self, nbytes: int, *, besides: Collection[str] = (), locked: int = 0) -> Slot | None:
        """A free slot, as a file of so many bytes; None if there is none.

        Args:
            besides: the names of others that are being filled.
            locked: how many of its first bytes a device copies to.

        It stays where free ones wait until the caller, who has filled it, moves it to where it
        belongs: what a trainer that is killed leaves behind is a free slot.

        Raises:
            StoreError: the memory file system is full.
        """
        names = [name for name in self._free() if name not in besides]
        if not names and self._lacking() > 0:  # the record was damaged that said what it is called
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
        """Give the memory of free slots back."""
        for name in self._free():
            (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all; the files stay."""
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
            with suppress(FileNotFoundError):  # it was retired meanwhile
                used += len(fnmatch.filter(os.listdir(self._run.step(step)), self._notes))
        return used

    def _lacking(self) -> int:
        """How many there should be more; what is becoming free meanwhile is there already."""
        in_use = self._in_use()
        return self._count - in_use - len(self._free())

    def _new_name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(4)}.slot"

    def _size(self, name: str) -> int:
        """The bytes that have pages; 0 if some lack theirs, as whoever gave them was killed."""
        try:
            found = (self._directory / name).stat()
        except FileNotFoundError:
            return 0
        return found.st_size if found.st_blocks * BLOCK >= found.st_size else 0

    def _allocated(self, name: str) -> int:
        """The bytes of the pages that a slot has."""
        try:
            return (self._directory / name).stat().st_blocks * BLOCK
        except FileNotFoundError:
            return 0

    def _lacks(self, nbytes: int) -> bool:
        """Whether there are not so many bytes, nor soon: agents have removed files mapped still."""
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
        """Give a file pages, so that writing to it can neither fail nor wait for them.

        If there are not enough, it is as it was.
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
        others = f"what its node is to keep for others needs {for_others:,} more, and "
        return StoreError(
            f"{self._directory} has {self._available():,} bytes left; "
            f"{others if for_others else ''}"
            f"{self._count} slots of {size:,} bytes for this rank need {needed:,} more: make it "
            "larger (containers: --shm-size; else: mount -o remount,size=…), keep fewer slots, or "
            "name another directory with Memory(dir=…); or save while the training waits, with "
            "memory=None"
        )


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
