"""Memory that a rank stages into: allocated, touched and mapped once, and used again and again."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.errors import StoreError
from shardwise.memory.home import Run
from shardwise.store.store import Buffer

ROOM = 1 << 20  # headers and the values of a rank differ a little from save to save
AT_A_TIME = 64 << 20
PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory of one snapshot's file: `buffer` is the file at `path`, called `name` when free."""

    name: str
    path: Path
    buffer: Buffer


class Slots:
    """The slots of one rank on one node.

    A slot that is taken becomes the data file of a snapshot; whoever retires the snapshot moves it
    back to where free ones wait.

    Args:
        run: what the node keeps of the run.
        prefix: what their names begin with: whose they are.
        named_by: a word in the names of the notes that say which of them are in use.
        count: how many there should be, those in use included.
    """

    def __init__(self, run: Run, prefix: str, named_by: str, count: int) -> None:
        self._run = run
        self._directory = run.free
        self._prefix = prefix
        self._notes = f"r{prefix[1:]}*.{named_by}*.json"
        self._count = count
        self._maps: dict[int, mmap.mmap] = {}

    def prepare(self, nbytes: int) -> int:
        """Have as many slots as there should be, each with room for so many bytes.

        Returns:
            The bytes that were allocated.

        Raises:
            StoreError: the memory file system is too small; says what is needed.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        size = _rounded(nbytes + ROOM)
        wanted = self._free()
        lacking = self._count - len(wanted) - self._in_use()
        wanted += [f"{self._prefix}{secrets.token_hex(4)}.slot" for _ in range(lacking)]
        sizes = {name: self._size(name) for name in wanted}
        growth = {name: size - has if has < nbytes else 0 for name, has in sizes.items()}
        needed = sum(growth.values())
        if needed > self._available():
            raise self._too_small(size, needed)
        for name in wanted:
            if growth[name]:
                self._allocate(self._directory / name, size)
            self._map(self._directory / name)
        return needed

    def has_free(self) -> bool:
        """Whether one is free."""
        return bool(self._free())

    def take(self, nbytes: int, *, besides: Collection[str] = ()) -> Slot | None:
        """A free slot, as a file of so many bytes; None if there is none.

        Args:
            besides: the names of others that are being filled.

        It stays where free ones wait until the caller, who has filled it, moves it to where it
        belongs: what a trainer that is killed leaves behind is a free slot.

        Raises:
            StoreError: the memory file system is full.
        """
        names = [name for name in self._free() if name not in besides]
        if not names:
            return None
        largest = max(names, key=self._size)
        path = self._directory / largest
        if self._size(largest) < nbytes:
            self._allocate(path, _rounded(nbytes))
        buffer = self._map(path)
        os.truncate(path, nbytes)
        return Slot(largest, path, buffer[:nbytes])

    def remove(self) -> None:
        """Give the memory of free slots back."""
        for name in self._free():
            (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all; the files stay."""
        self._maps.clear()

    def _free(self) -> list[str]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.startswith(self._prefix))

    def _in_use(self) -> int:
        return sum(len(list(self._run.step(step).glob(self._notes))) for step in self._run.steps())

    def _size(self, name: str) -> int:
        try:
            return (self._directory / name).stat().st_size
        except FileNotFoundError:
            return 0

    def _available(self) -> int:
        stat = os.statvfs(self._directory)
        return stat.f_bavail * stat.f_frsize

    def _allocate(self, path: Path, size: int) -> None:
        """Give a file pages, so that writing to it can neither fail nor wait for them."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

                def touch(at: int) -> None:
                    os.posix_fallocate(fd, at, min(AT_A_TIME, size - at))

                list(pool.map(touch, range(0, size, AT_A_TIME)))
        except OSError as error:
            raise self._too_small(size, size) from error
        finally:
            os.close(fd)

    def _map(self, path: Path) -> Buffer:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            known = self._maps.get(found.st_ino)
            if known is None or len(known) < found.st_size:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                known = self._maps[found.st_ino] = mmap.mmap(fd, found.st_size, flags)
            return np.frombuffer(known, np.uint8)
        finally:
            os.close(fd)

    def _too_small(self, size: int, needed: int) -> StoreError:
        return StoreError(
            f"{self._directory} has {self._available():,} bytes left; "
            f"{self._count} slots of {size:,} bytes for this rank need {needed:,} more: make it "
            "larger (containers: --shm-size; else: mount -o remount,size=…), keep fewer slots, or "
            "name another directory with Memory(dir=…)"
        )


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
