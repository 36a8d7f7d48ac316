"""The record of completed files, from which an interrupted export resumes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shardwise.convert.plan import Late, Output, Part, Sums
from shardwise.errors import CheckpointExistsError
from shardwise.store import LocalStore

FOLDER = ".shardwise-convert"
IDENTITY = "identity"
LOCK = "lock"


class _Done(msgspec.Struct, frozen=True):
    name: str
    plan: str
    sums: list[int]


class Journal:
    """A directory of records in the target, one for each complete file.

    Args:
        folder: the target.
        identity: the source and the options; an export with another identity is not resumed.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._records = folder / FOLDER
        self._identity = identity

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Create the target and lock it. Files in it must belong to the same export.

        Raises:
            CheckpointExistsError: the target holds something else, is a file or below one, or
                another process is writing to it.
        """
        self._check()
        records = LocalStore(self._records)
        with records.hold(LOCK, shared=False) as held:
            if not held:
                raise CheckpointExistsError(
                    f"another process is writing to {self._folder}: wait until it ends, or choose "
                    "a new directory"
                )
            self._check()  # again, now that no other process can change it
            records.publish(IDENTITY, self._identity.encode(), replace=True)
            yield

    def _check(self) -> None:
        above = next(
            each for each in (self._folder, *self._folder.parents) if os.path.lexists(each)
        )
        if not above.is_dir():
            what = "a file" if above.exists() else "a dangling symbolic link"
            raise CheckpointExistsError(f"{above} is {what}: choose a new directory")
        kept = self._records / IDENTITY
        found = sorted({path.name for path in self._folder.glob("*")} - {FOLDER})
        if found and not kept.is_file():
            raise CheckpointExistsError(
                f"{self._folder} is not empty (it has {found[0]}): choose a new directory"
            )
        if kept.is_file() and kept.read_text() != self._identity:
            raise CheckpointExistsError(
                f"{self._folder} holds another unfinished export (of another source or with other "
                "options): remove it, or choose a new directory"
            )

    def sums_of(self, output: Output) -> Sums | None:
        """Return the checksums of a complete output; None if it is not complete."""
        try:
            done = msgspec.json.decode(self._record(output).read_bytes(), type=_Done)
        except (OSError, msgspec.DecodeError):
            return None
        path = self._folder / output.name
        whole = path.is_file() and path.stat().st_size == output.size
        return done.sums if whole and done.plan == _plan(output) else None

    def complete(self, output: Output, sums: Sums) -> None:
        """Record that an output is durable."""
        record = self._record(output)
        partial = record.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(_Done(output.name, _plan(output), list(sums))))
        partial.replace(record)

    def end(self) -> None:
        """Remove all records."""
        for record in self._records.glob("*"):
            record.unlink()
        self._records.rmdir()

    def _record(self, output: Output) -> Path:
        return (
            self._records / f"{hashlib.blake2b(output.name.encode(), digest_size=16).hexdigest()}"
        )


def _plan(output: Output) -> str:
    """Return a digest of the contents of an output."""
    digest = hashlib.blake2b(digest_size=16)
    for segment in output.segments:
        if isinstance(segment, bytes):
            digest.update(segment)
        elif isinstance(segment, Part):
            digest.update(repr(segment).encode())
        elif isinstance(segment, Late):
            digest.update(b"%d" % segment.size)
    return digest.hexdigest()
