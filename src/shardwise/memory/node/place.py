"""A snapshot on a node: its directory, and the records in it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from shardwise.errors import StoreError
from shardwise.manifest.manifest import decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.node.home import Run, hold, read_record
from shardwise.memory.records import Done, Kept, PendingManifest, Staged

ABANDONED = "abandoned"
POLL = 0.002
log = logging.getLogger("shardwise.agent")
T = TypeVar("T")


class Held(Exception):  # noqa: N818
    """Others work on a snapshot, or use it: what was to be done can be later."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"{place.path} is held")


@dataclass(frozen=True)
class Place:
    """A snapshot on this node."""

    run: Run
    step: int

    @cached_property
    def path(self) -> Path:
        """Its directory."""
        return self.run.step(self.step)

    def beside(self, name: str) -> Path:
        """Where a file of it is made, before it has its name."""
        return self.path / f".{name}"

    @contextmanager
    def hold(self, *, shared: bool) -> Iterator[bool]:
        """Keep it from being retired while the block runs; or, not shared, from all other work.

        Yields False, at once, where that cannot be had. It is let go also if the process dies.
        """
        with hold(self.path, shared=shared) as held:
            yield held

    def named(self, suffix: str) -> list[str]:
        """The names in it that end so."""
        try:
            return sorted(name for name in os.listdir(self.path) if name.endswith(suffix))
        except FileNotFoundError:
            return []

    def drafts(self) -> list[PendingManifest]:
        """The drafts in it: one, unless the step was saved twice."""
        return self._drafts("draft-")

    def terms(self) -> list[PendingManifest]:
        """The drafts that other nodes lead, as those have told this one."""
        return self._drafts("terms-")

    def _drafts(self, prefix: str) -> list[PendingManifest]:
        return self._whole(
            [name for name in self.named(".json") if name.startswith(prefix)], PendingManifest
        )

    def staged(self) -> list[Staged]:
        """The files in it that trainers have staged. A record whose file is not there does not
        count: the trainer was killed before it moved the file here."""
        found = self._whole(self.named(".staged.json"), Staged)
        return [each for each in found if self.has(each.file.name)]

    def age(self) -> float:
        """Seconds since something was staged in it for the last time; 0 if nothing was."""
        times = []
        for name in self.named(".staged.json"):
            with suppress(FileNotFoundError):
                times.append((self.path / name).stat().st_mtime)
        return max(0.0, time.time() - max(times)) if times else 0.0

    def saves(self) -> set[str]:
        """The ids of the saves of which trainers have staged something in it."""
        return {records.save_of(name) for name in self.named(".staged.json")}

    def kept(self) -> list[Kept]:
        """What trainers have made for others from their replicas."""
        return self._whole([name for name in self.named(".json") if records.is_kept(name)], Kept)

    def ended(self, stage: str, save_id: str) -> Done | None:
        """How a stage has ended for the cluster, if it has; badly, if nobody can tell any more."""
        name = records.outcome(stage, save_id)
        try:
            return read_record(self.path / name, Done)
        except StoreError as error:
            self._tell_of_damage(name, error)
            return Done(save_id=save_id, stage=stage, failure=f"its outcome is damaged: {error}")

    def _whole(self, names: list[str], kind: type[T]) -> list[T]:
        """The records of these names, but for those that are damaged: nothing comes of them."""
        found = []
        for name in names:
            try:
                record = read_record(self.path / name, kind)
            except StoreError as error:
                self._tell_of_damage(name, error)
                continue
            if record is not None:
                found.append(record)
        return found

    def _tell_of_damage(self, name: str, error: StoreError) -> None:
        """Once, whoever comes across it: a file that is made beside it says that it was told."""
        with suppress(OSError):
            self.beside(f"{name}.damaged").touch(exist_ok=False)
            log.error("nothing comes of a record that is damaged: %s", error)

    def abandon(self) -> None:
        """Have whoever waits for something to become of it cease to."""
        with suppress(FileNotFoundError):
            (self.path / ABANDONED).touch()

    def refuse_abandoned(self) -> None:
        """Raise if nothing is to become of it any more.

        Raises:
            StoreError: the run has gone on from an older step.
        """
        if self.has(ABANDONED):
            raise StoreError(f"step {self.step} is abandoned: the run went on from an older one")

    def has_ended(self, stage: str) -> bool:
        """Whether a stage has ended for any save of it."""
        return any(name.startswith(f"{stage}-all-") for name in self.named(".json"))

    def is_committed(self) -> bool:
        """Whether it has a manifest."""
        return self.has(MANIFEST)

    def manifest_of(self, save_id: str) -> bytes:
        """The manifest that a save was committed by.

        Raises:
            StoreError: another save of the step is committed by now.
        """
        manifest = (self.path / MANIFEST).read_bytes()
        if decode_manifest(manifest).save_id != save_id:
            raise StoreError(f"step {self.step} was saved again meanwhile")
        return manifest

    def expect(self, name: str, deadline: float, *, failed: str = "") -> None:
        """Wait until there is a file of this name.

        Args:
            deadline: until when, as `time.monotonic` has it.
            failed: the record, a `Done`, that says that it will never come, and why.

        Raises:
            StoreError: it did not appear in time, or never will, or the snapshot is abandoned.
        """
        while not self.has(name):
            self.refuse_abandoned()
            if failed and (why := read_record(self.path / failed, Done)) is not None:
                raise StoreError(why.failure)
            if time.monotonic() > deadline:
                raise StoreError(f"{self.path / name} did not appear in time")
            time.sleep(POLL)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return (self.path / name).exists()
