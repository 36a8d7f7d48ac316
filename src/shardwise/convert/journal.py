"""The journal of an export: records of the files that are complete, to resume it after a crash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shardwise.convert.plan import BytesFromChecksums, OutputFile, RangeChecksums, TensorPart
from shardwise.errors import CheckpointExistsError
from shardwise.store import LocalStore

RECORDS = ".shardwise-convert"
IDENTITY = "identity"
LOCK = "lock"


class _FileRecord(msgspec.Struct, frozen=True):
    """A complete file: its name, a digest of its planned contents, and its checksums."""

    name: str
    plan: str
    sums: list[int]


class Journal:
    """The records of an export, in a directory of the target.

    Args:
        folder: the target.
        identity: identifies the source and the options; only the same export is resumed.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._records = folder / RECORDS
        self._identity = identity

    @contextmanager
    def lock_target(self) -> Iterator[None]:
        """Create the target, and lock it while the block runs.

        Raises:
            CheckpointExistsError: the target has files of something else, its path is a file or
                below a file, or another process is writing to it.
        """
        self._check()
        records = LocalStore(self._records)
        with records.hold(LOCK, shared=False) as locked:
            if not locked:
                raise CheckpointExistsError(
                    f"another process is writing to {self._folder}: wait until it ends, or choose "
                    "a new directory"
                )
            self._check()  # again, because another process may have changed the target
            records.publish(IDENTITY, self._identity.encode(), replace=True)
            yield

    def _check(self) -> None:
        existing = next(
            each for each in (self._folder, *self._folder.parents) if os.path.lexists(each)
        )
        if not existing.is_dir():
            kind = "a file" if existing.exists() else "a dangling symbolic link"
            raise CheckpointExistsError(
                f"{self._folder}: cannot be created, because {existing} is {kind}. Choose a new "
                "directory"
            )
        identity_file = self._records / IDENTITY
        names = sorted({path.name for path in self._folder.glob("*")} - {RECORDS})
        if names and not identity_file.is_file():
            raise CheckpointExistsError(
                f"{self._folder} is not empty (it has {names[0]}): choose a new directory"
            )
        if identity_file.is_file() and identity_file.read_text() != self._identity:
            raise CheckpointExistsError(
                f"{self._folder} holds another unfinished export, of another source or with other "
                "options: remove the directory, or choose a new one"
            )

    def read_sums(self, file: OutputFile) -> RangeChecksums | None:
        """Return the checksums of a file from its record; None if the file is not complete."""
        try:
            record = msgspec.json.decode(self._record_path(file).read_bytes(), type=_FileRecord)
        except (OSError, msgspec.DecodeError):
            return None
        path = self._folder / file.name
        has_full_size = path.is_file() and path.stat().st_size == file.size
        return record.sums if has_full_size and record.plan == _digest_contents(file) else None

    def record_sums(self, file: OutputFile, sums: RangeChecksums) -> None:
        """Record that a file is complete and durable."""
        path = self._record_path(file)
        temporary = path.with_suffix(".part")
        record = _FileRecord(file.name, _digest_contents(file), list(sums))
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.replace(path)

    def remove(self) -> None:
        """Remove all records."""
        for record in self._records.glob("*"):
            record.unlink()
        self._records.rmdir()

    def _record_path(self, file: OutputFile) -> Path:
        return self._records / hashlib.blake2b(file.name.encode(), digest_size=16).hexdigest()


def _digest_contents(file: OutputFile) -> str:
    """Return a digest of what a file is planned to contain."""
    digest = hashlib.blake2b(digest_size=16)
    for segment in file.segments:
        if isinstance(segment, bytes):
            digest.update(segment)
        elif isinstance(segment, TensorPart):
            # Records of earlier versions have digests of this text.
            text = f"Part(name={segment.name!r}, box={segment.box!r}, dtype={segment.dtype!r})"
            digest.update(text.encode())
        elif isinstance(segment, BytesFromChecksums):
            digest.update(b"%d" % segment.size)
    return digest.hexdigest()
