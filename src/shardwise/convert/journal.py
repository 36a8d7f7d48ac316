"""What of a conversion is done, so that one that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shardwise.convert.output import Late, Output, Part, Sums
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
    """Notes beside the files of a conversion, one for each that is complete.

    Args:
        folder: the target.
        identity: what is converted and how; a conversion of something else does not go on.

    Raises:
        CheckpointExistsError: something else is at the target.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._notes = folder / FOLDER
        self._identity = identity

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Make the target, and hold it; what is there must be begun by the same conversion.

        Raises:
            CheckpointExistsError: it holds something else, is a file or below one, or another
                process is converting into it.
        """
        self._check()
        notes = LocalStore(self._notes)
        with notes.hold(LOCK, shared=False) as held:
            if not held:
                raise CheckpointExistsError(
                    f"another process is converting into {self._folder}: wait until it has ended, "
                    "or convert into a new directory"
                )
            self._check()  # what was there before this was held, may be another's by now
            notes.publish(IDENTITY, self._identity.encode(), replace=True)
            yield

    def _check(self) -> None:
        above = next(
            each for each in (self._folder, *self._folder.parents) if os.path.lexists(each)
        )
        if not above.is_dir():
            what = "a file" if above.exists() else "a link that leads nowhere"
            raise CheckpointExistsError(f"{above} is {what}: convert into a new directory")
        kept = self._notes / IDENTITY
        found = sorted({path.name for path in self._folder.glob("*")} - {FOLDER})
        if found and not kept.is_file():
            raise CheckpointExistsError(
                f"{self._folder} is not empty (it has {found[0]}): convert into a new directory"
            )
        if kept.is_file() and kept.read_text() != self._identity:
            raise CheckpointExistsError(
                f"{self._folder} holds the beginning of another conversion: remove it, "
                "or convert into a new directory"
            )

    def sums_of(self, output: Output) -> Sums | None:
        """The checksums of an output that is complete; None if it is not."""
        try:
            done = msgspec.json.decode(self._note(output).read_bytes(), type=_Done)
        except (OSError, msgspec.DecodeError):
            return None
        path = self._folder / output.name
        whole = path.is_file() and path.stat().st_size == output.size
        return done.sums if whole and done.plan == _plan(output) else None

    def complete(self, output: Output, sums: Sums) -> None:
        """Note that an output is durable."""
        note = self._note(output)
        beside = note.with_suffix(".part")
        beside.write_bytes(msgspec.json.encode(_Done(output.name, _plan(output), list(sums))))
        beside.replace(note)

    def end(self) -> None:
        """Remove the notes."""
        for note in self._notes.glob("*"):
            note.unlink()
        self._notes.rmdir()

    def _note(self, output: Output) -> Path:
        return self._notes / f"{hashlib.blake2b(output.name.encode(), digest_size=16).hexdigest()}"


def _plan(output: Output) -> str:
    """What an output consists of, in brief."""
    digest = hashlib.blake2b(digest_size=16)
    for segment in output.segments:
        if isinstance(segment, bytes):
            digest.update(segment)
        elif isinstance(segment, Part):
            digest.update(repr(segment).encode())
        elif isinstance(segment, Late):
            digest.update(b"%d" % segment.size)
    return digest.hexdigest()
