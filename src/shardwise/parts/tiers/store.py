"""`TieredStore`: reads each piece of a checkpoint from the nearest tier that has it intact."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.errors import CorruptionError, FormatError
from shardwise.kernel.manifest.manifest import MANIFEST, decode_manifest
from shardwise.kernel.store import (
    CachedFile,
    FileStatus,
    ReadableFile,
    ReadOnlyStore,
    Store,
    StoreTraits,
    count_retries,
    lock_for_reading,
)
from shardwise.kernel.store.store import Buffer

Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger("shardwise")


class TieredStore(ReadOnlyStore):
    """A read-only store over a root and its mirror, the tiers.

    Each tier may hold a copy of a file. `DataReader` verifies each block, and reads a missing or
    damaged block from the next tier. A tier that cannot be reached is skipped with a warning. An
    error is raised only if no other tier has the file.

    Args:
        root, mirror: the tiers. The root is asked first.

    Attributes:
        names: the names of the tiers, by which `origins` counts bytes.
    """

    names = "root", "mirror"
    advice_to_writers = "it has several tiers; save to the root, and the mirror gets a copy"

    def __init__(self, root: Store, mirror: Store) -> None:
        self._tiers = root, mirror
        self._bytes_read = [0, 0]
        self._count_lock = threading.Lock()

    def __str__(self) -> str:
        return str(self._tiers[0])

    @property
    def retries(self) -> int:
        """How many requests to the tiers were repeated so far."""
        return sum(map(count_retries, self._tiers))

    def origins(self) -> dict[str, int]:
        """Return how many bytes of data files were read so far, from "root" and "mirror".

        Bytes that turned out to be damaged count, too. A store that `at` returns has
        counts for itself.
        """
        with self._count_lock:
            return dict(zip(self.names, self._bytes_read, strict=True))

    def tier_to_verify(self) -> Store:
        """Return the root alone; the mirror alone if the root does not have the checkpoint."""
        root, mirror = self._tiers
        return root if CheckpointDirectory(root).state() == "committed" else mirror

    def has_two_saves(self) -> bool:
        """Return whether the mirror has another save of a checkpoint than the root.

        The result is False if one of them has no checkpoint, or does not answer.
        """
        saves = set()
        for tier in self._tiers:
            with suppress(OSError):
                manifest = CheckpointDirectory(tier).saved()
                saves |= set() if manifest is None else {manifest.save_id}
        return len(saves) > 1

    @property
    def traits(self) -> StoreTraits:
        """The traits of the root. Readers lock the checkpoint, wherever a tier has locks."""
        return replace(self._tiers[0].traits, lock_expiry=0.0)

    def stat(self, path: str) -> FileStatus | None:
        """Return the status of a path, from the nearest tier that has something there."""
        return next((found for tier in self._tiers if (found := tier.stat(path)) is not None), None)

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the files at all levels below, in any tier.

        Raises:
            StoreError: there are more than `limit` files.
        """
        found: dict[str, FileStatus] = {}
        for tier in reversed(self._tiers):
            found.update(tier.walk(limit))
        return dict(sorted(found.items()))

    def at(self, name: str) -> TieredStore:
        """Return the store one level below, in all tiers."""
        root, mirror = self._tiers
        return TieredStore(root.at(name), mirror.at(name))

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        """Open a file. The tiers are opened when they are needed.

        Raises:
            FileNotFoundError: no tier has the file.
        """
        return _TieredFile(path, self._tiers, self._count)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file from the nearest tier that has it.

        Raises:
            FormatError: this is a manifest, and damaged in all tiers that have it.
        """

        def read(tier: Store) -> bytes:
            try:
                data = tier.read(key, limit=limit)
                if key == MANIFEST:
                    decode_manifest(data)
            except FormatError as error:
                log.warning("%s of %s is damaged: %s", key, tier, error)
                raise FormatError(f"{tier}: {error}") from error
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    log.warning("%s of %s cannot be read: %s", key, tier, error)
                raise
            return data

        return _first_result(read, self._tiers)

    def list(self) -> list[str]:
        """Return the names that any tier has.

        Raises:
            OSError: a tier cannot be listed, and no other tier has any name.
        """
        names: set[str] = set()
        failures: list[Exception] = []
        for tier in self._tiers:
            try:
                names.update(tier.list())
            except OSError as error:  # noqa: PERF203 - few tiers
                failures.append(error)
        if failures and not names:
            raise _choose_error(failures)
        for failure in failures:
            log.warning("a tier of %s is skipped: %s", self, failure)
        return sorted(names)

    def _count(self, tier: int, nbytes: int) -> None:
        with self._count_lock:
            self._bytes_read[tier] += nbytes

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """Lock a file in all tiers that have it, so that retention does not remove it."""
        if not shared:
            raise self.refusal()
        with ExitStack() as locks:
            held = False
            for tier in self._tiers:
                try:
                    held |= locks.enter_context(lock_for_reading(tier, key))
                except OSError as error:  # noqa: PERF203 - few tiers
                    log.warning("%s in %s is not locked: %s", key, tier, error)
            yield held


class _TieredFile:
    """A file with a copy in each tier that has it. Copies are opened when they are needed.

    Args:
        count: called with the index of a tier and the bytes that were read from it.

    Raises:
        FileNotFoundError: no tier has the file.
    """

    def __init__(self, key: str, tiers: Sequence[Store], count: Callable[[int, int], None]) -> None:
        self._key = key
        self._tiers = tiers
        self._count = count
        self._lock = threading.Lock()
        self._files: dict[int, ReadableFile | Exception] = {}
        self.copies = len(tiers)
        self.size = _first_result(self._copy, range(self.copies)).size

    def copy_size(self, number: int) -> int:
        return self._copy(number).size

    def read_at(self, offset: int, out: Buffer) -> int:
        copies = range(self.copies)
        return _first_result(lambda number: self.read_copy(number, offset, out), copies)

    def is_cached(self, offset: int, count: int) -> bool:
        with suppress(OSError, CorruptionError):
            file = self._copy(0)
            return isinstance(file, CachedFile) and file.is_cached(offset, count)
        return False

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        nbytes = self._copy(number).read_at(offset, out)
        self._count(number, nbytes)
        return nbytes

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            if not isinstance(file, Exception):
                file.close()

    def _copy(self, number: int) -> ReadableFile:
        """Return the file in a tier. A tier that could not open it is not asked again."""
        with self._lock:
            if number not in self._files:
                try:
                    self._files[number] = self._tiers[number].open(self._key)
                except (OSError, CorruptionError) as error:
                    self._files[number] = error
            file = self._files[number]
        if isinstance(file, Exception):
            raise file
        return file


def _first_result(use: Callable[[Item], Result], items: Iterable[Item]) -> Result:
    """Return the result of `use` for the first item for which it does not fail."""
    failures: list[Exception] = []
    for item in items:
        try:
            return use(item)
        except (OSError, CorruptionError) as error:  # noqa: PERF203 - few tiers
            failures.append(error)
    raise _choose_error(failures)


def _choose_error(failures: Sequence[Exception]) -> Exception:
    """Return the first failure that does not merely say that a file is missing."""
    for failure in failures:
        if not isinstance(failure, (FileNotFoundError, NotADirectoryError)):
            return failure
    return failures[0]
