"""Where a node keeps its snapshots, and how all in there is named.

<dir>/shardwise-<user>/
  agent.json  agent.lock  agent.bell  agent.log  agent.secret  agent.port  node
  runs/<run>/free/r00003-0.slot            memory that waits to be staged into
  runs/<run>/free/<id>.spare               memory that the agent takes for others again
  runs/<run>/step-00000010/                a snapshot
    r00003-<save>.safetensors              data files of this node's ranks
    r00003-<save>.staged.json  …           records: how far each of them has come
    manifest.json                          committed for the cluster
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from shardwise.engine.ring import ring
from shardwise.errors import StoreError
from shardwise.manifest.manifest import decode_manifest
from shardwise.manifest.names import MANIFEST, step_directory, step_of_directory
from shardwise.memory import records
from shardwise.memory.records import Done, Kept, PendingManifest, Staged

FREE = "free"
ROOT = "root.json"
ENDED = "ended"
LARGEST_RECORD = 1 << 28
_RUN = re.compile(r"[0-9a-f]{16}")
T = TypeVar("T")


class Home:
    """The directory of one node, made if it is not there; nobody else may look into it.

    Raises:
        StoreError: it cannot be made, or belongs to somebody else.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory).absolute() / f"shardwise-{os.getuid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = os.lstat(self.path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise StoreError(f"{self.path} is a link, or somebody else's: remove it")
            os.chmod(self.path, 0o700)
            (self.path / "runs").mkdir(exist_ok=True)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{self.path}: snapshots cannot be kept there: {error}") from error

    def __str__(self) -> str:
        return str(self.path)

    @property
    def info(self) -> Path:
        """Who the agent is, and how to talk to it."""
        return self.path / "agent.json"

    @property
    def bell(self) -> Path:
        """A pipe that wakes the agent."""
        return self.path / "agent.bell"

    @property
    def log(self) -> Path:
        """What the agent has to say."""
        return self.path / "agent.log"

    def runs(self) -> list[str]:
        """The runs of which something is kept."""
        return sorted(each.name for each in (self.path / "runs").iterdir())

    def run(self, run: str) -> Run:
        """What is kept of a run.

        Raises:
            StoreError: this is no run's id.
        """
        if not _RUN.fullmatch(run):
            raise StoreError(f"{run!r} is no id of a run")
        return Run(self.path / "runs" / run)

    def open_lock(self, name: str) -> int:
        """Open a file by which processes of the node know of each other.

        Raises:
            StoreError: the home is gone.
        """
        try:
            return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self} was removed while it is in use, and the snapshots in it: start the "
                "training again, and see what cleans up there (systemd's RemoveIPC=, a batch job)"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Be the agent while the block runs; yields False if another is."""
        fd = self.open_lock("agent.lock")
        try:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            yield False
        finally:
            os.close(fd)

    def wake(self) -> None:
        """Have the agent look at the records, if one lives here."""
        with suppress(OSError):
            fd = os.open(self.bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                ring(fd)
            finally:
                os.close(fd)

    def has_agent(self) -> bool:
        """Whether an agent lives here."""
        fd = self.open_lock("agent.lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look see no agent
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


@dataclass(frozen=True)
class Run:
    """What a node keeps of one run."""

    path: Path

    @property
    def name(self) -> str:
        """Its id."""
        return self.path.name

    @property
    def free(self) -> Path:
        """Where slots wait."""
        return self.path / FREE

    def steps(self) -> list[int]:
        """The steps of which there is anything, ascending."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(step for name in names if (step := step_of_directory(name)) is not None)

    def step(self, step: int) -> Path:
        """The directory of a snapshot."""
        return self.path / step_directory(step)


@contextmanager
def hold(directory: Path, *, shared: bool) -> Iterator[bool]:
    """Lock a directory, while the block runs, against those who would remove it; or, not shared,
    against all.

    Yields False, at once, where that cannot be had. It is let go also if the process dies.
    """
    fd = -1
    with suppress(FileNotFoundError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if fd < 0:
        yield False
        return
    try:
        held = True
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
        yield held and os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)


def new_run() -> str:
    """An id that no other run has."""
    return secrets.token_hex(8)


def write_record(path: Path, record: object) -> None:
    """Have a record appear, whole, in place of what was there before."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(record if isinstance(record, bytes) else msgspec.json.encode(record))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path, kind: type[T]) -> T | None:
    """A record, or None if there is none.

    Raises:
        StoreError: it is not what its name says.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_RECORD)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{path}: {error}") from error


ABANDONED = "abandoned"
POLL = 0.002
log = logging.getLogger("shardwise.agent")


class SnapshotHeld(Exception):  # noqa: N818
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

    def temporary(self, name: str) -> Path:
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

    def pending_manifests(self) -> list[PendingManifest]:
        """Return the pending manifests of saves that this node leads: one for each save."""
        saves = records.requested("pending", self.named(".json"))
        return self._whole([records.pending(each) for each in saves], PendingManifest)

    def pending_copies(self) -> list[PendingManifest]:
        """Return the copies of pending manifests of saves that other nodes lead."""
        saves = records.requested("pending-copy", self.named(".json"))
        return self._whole([records.pending_copy(each) for each in saves], PendingManifest)

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
            self.log_damage(name, error)
            return Done(save_id=save_id, stage=stage, failure=f"its outcome is damaged: {error}")

    def _whole(self, names: list[str], kind: type[T]) -> list[T]:
        """The records of these names, but for those that are damaged: nothing comes of them."""
        found = []
        for name in names:
            try:
                record = read_record(self.path / name, kind)
            except StoreError as error:
                self.log_damage(name, error)
                continue
            if record is not None:
                found.append(record)
        return found

    def log_damage(self, name: str, error: StoreError) -> None:
        """Once, whoever comes across it: a file that is made beside it says that it was told."""
        with suppress(OSError):
            self.temporary(f"{name}.damaged").touch(exist_ok=False)
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
