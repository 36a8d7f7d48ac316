"""Stores whose reads, copies or time a test knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shardwise.kernel.store import LocalStore
from shardwise.parts.stores.object_store import ObjectStore
from shardwise.parts.stores.remote import RetryingStore
from shardwise.parts.stores.retry import Retry
from shardwise.ports.store import Buffer, ReadableFile, Store

BLOCK = 64 * 1024


class CountingStore(LocalStore):
    """A store of files in a directory.

    Attributes:
        blocks: how often each block of each file was read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blocks: Counter[tuple[str, int]] = Counter()

    def open(self, path: str, size: int | None = None) -> ReadableFile:  # type: ignore[override]
        """Open a file whose reads are counted, but for its first: the table of checksums."""
        file = super().open(path)
        return file if path == "manifest.json" else _CountingFile(file, path, self.blocks)


class _CountingFile:
    def __init__(self, file: ReadableFile, key: str, blocks: Counter[tuple[str, int]]) -> None:
        self._file = file
        self._key = key
        self._blocks = blocks
        self._table_read = False
        self.size = file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        if self._table_read:
            stop = -(-(offset + len(out)) // BLOCK)
            self._blocks.update((self._key, block) for block in range(offset // BLOCK, stop))
        self._table_read = True  # nothing can be verified without it
        return self._file.read_at(offset, out)

    def close(self) -> None:
        self._file.close()


class CopiesStore(LocalStore):
    """A directory of which some files have several copies, which are all there is of them.

    Args:
        path: the directory.
        copies: the contents of the copies of files by name; None for a copy that is gone.
    """

    def __init__(self, path: Path, copies: Mapping[str, list[bytes | None]]) -> None:
        super().__init__(path)
        self._copies = copies

    def open(self, path: str, size: int | None = None) -> ReadableFile:  # type: ignore[override]
        """Open a file; its copies if it has some."""
        copies = self._copies.get(path)
        return super().open(path) if copies is None else _Copies(copies)


class _Copies:
    """A file with several copies; see `ReplicatedFile`."""

    def __init__(self, copies: list[bytes | None]) -> None:
        self._copies = copies
        self.copies = len(copies)
        self.size = max(len(each or b"") for each in copies)

    def read_at(self, offset: int, out: Buffer) -> int:
        first = next(i for i, each in enumerate(self._copies) if each is not None)
        return self.read_copy(first, offset, out)

    def copy_size(self, number: int) -> int:
        return len(self._copies[number] or b"")

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        data = self._copies[number]
        if data is None:
            raise OSError("this copy is gone")
        part = data[offset : offset + len(out)]
        out.data[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


class CachedStore(LocalStore):
    """A directory whose data files say that they are in the page cache, or that they are not.

    Args:
        path: the directory.
        is_cached: what the files say.
        copies: the contents of the copies of each data file. The first one is read first.

    Attributes:
        buffers: the address and the size of each buffer of a read.
    """

    def __init__(self, path: Path, *, is_cached: bool, copies: list[bytes]) -> None:
        super().__init__(path)
        self.is_cached, self.contents = is_cached, copies
        self.buffers: list[tuple[int, int]] = []

    def open(self, path: str, size: int | None = None) -> ReadableFile:  # type: ignore[override]
        """Open a file."""
        return super().open(path) if path == "manifest.json" else _Cached(self)


class _Cached:
    def __init__(self, store: CachedStore) -> None:
        self._store, self.copies = store, len(store.contents)
        self.size = len(store.contents[0])

    def is_cached(self, offset: int, count: int) -> bool:
        return self._store.is_cached

    def read_at(self, offset: int, out: Buffer) -> int:
        return self.read_copy(0, offset, out)

    def copy_size(self, number: int) -> int:
        return self.size

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        part = self._store.contents[number][offset : offset + len(out)]
        out.data[: len(part)] = part
        self._store.buffers.append((out.ctypes.data, len(out)))
        return len(part)

    def close(self) -> None:
        pass


def store_with_own_clock(url: str, retry: int = 10) -> tuple[RetryingStore, list[float]]:
    """Return an object store, and its time, which only pauses between attempts change."""
    return with_own_clock(ObjectStore(url), retry)


def with_own_clock(store: Store, retry: int) -> tuple[RetryingStore, list[float]]:
    """Return a store whose operations are repeated, and its time, which only pauses change.

    Args:
        retry: for how many seconds an operation is repeated.
    """
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return RetryingStore(store, Retry(retry, 10.0, lambda: now[0], sleep)), now
