"""The journal of an export: records of the files that are complete, to resume it after a crash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

import msgspec

from shardwise.convert.plan import OutputFile, RangeChecksums
from shardwise.errors import CheckpointExistsError, StoreError
from shardwise.store import Store, why_no_directory

RECORDS = ".shardwise-convert"
IDENTITY = "identity"
LOCK = "lock"
LARGEST_RECORD = 1 << 30
MOST_FILES = 1 << 22


class Journal:
    """The records of an export, in a directory of the target.

    Args:
        target: the target.
        identity: identifies the source, the options, and all that decides what the files contain;
            only the same export is resumed.
    """

    def __init__(self, target: Store, identity: str) -> None:
        self._target = target
        self._records = target.at(RECORDS)
        self._identity = identity

    @contextmanager
    def lock_target(self) -> Iterator[None]:
        """Create the target, and lock it while the block runs.

        Raises:
            CheckpointExistsError: the target has files that no export of this source wrote, its
                path is a file or below a file, or another process is writing to it.
        """
        self._check()
        with self._records.lock(LOCK) as locked:
            if not locked:
                raise CheckpointExistsError(
                    f"another process is writing to {self._target}: wait until it ends, or choose "
                    "a new directory"
                )
            self._check()  # again, because another process may have changed the target
            self._records.publish(IDENTITY, self._identity.encode(), replace=True)
            yield
        # NFS keeps the directory while the lock is held. Another process may be using it by now.
        with suppress(OSError):
            self._records.delete("")

    def _check(self) -> None:
        obstacle = why_no_directory(self._target)
        if obstacle:
            raise CheckpointExistsError(
                f"{self._target}: cannot be created, because {obstacle}. Choose a new directory"
            )
        names = [name for name in self._target.list() if name != RECORDS]
        try:
            identity = self._records.read(IDENTITY, limit=LARGEST_RECORD).decode()
        except FileNotFoundError:
            identity = None
        if names and identity is None:
            raise CheckpointExistsError(
                f"{self._target} is not empty (it has {names[0]}): choose a new directory"
            )
        if identity not in (None, self._identity):
            raise CheckpointExistsError(
                f"{self._target} holds another unfinished export, of another source or with other "
                "options: remove the directory, or choose a new one"
            )

    @cached_property
    def _sizes_at_start(self) -> dict[str, int]:
        """The sizes of the files in the target at the start of this process."""
        return {name: status.size for name, status in self._target.walk(MOST_FILES).items()}

    def read_sums(self, file: OutputFile) -> RangeChecksums | None:
        """Return the checksums of a file from its record; None if the file is not complete."""
        name = _record_of(file)
        sizes = self._sizes_at_start
        if sizes.get(file.name) != file.size or f"{RECORDS}/{name}" not in sizes:
            return None
        try:
            data = self._records.read(name, limit=LARGEST_RECORD)
            return msgspec.json.decode(data, type=list[int])
        except (OSError, StoreError, msgspec.DecodeError):
            return None

    def record_sums(self, file: OutputFile, sums: RangeChecksums) -> None:
        """Record that a file is complete and durable."""
        self._records.publish(_record_of(file), msgspec.json.encode(list(sums)), replace=True)

    def remove(self) -> None:
        """Remove all records. `lock_target` removes their directory when its block ends."""
        for name in self._records.list():
            self._records.delete(name)


def _record_of(file: OutputFile) -> str:
    """Return the name of the record of a file."""
    return hashlib.blake2b(file.name.encode(), digest_size=16).hexdigest()
