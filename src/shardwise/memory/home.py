"""The directory in which a node keeps its snapshots, and the names of the files in it.

<dir>/shardwise-<user>/
  agent.json  agent.lock  agent.bell  agent.log  agent.secret  agent.port  node
  runs/<run>/free/r00003-0.slot            a free slot
  runs/<run>/free/<id>.spare               a file that the agent reuses for copies and parity
  runs/<run>/step-00000010/                a snapshot
    r00003-<save>.safetensors              data files of this node's ranks
    r00003-<save>.staged.json  …           records: the stages that were requested and reached
    manifest.json                          written when the snapshot is committed
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
    """The directory of one node, created if necessary. Other users cannot read it.

    Raises:
        StoreError: the directory cannot be created, or belongs to another user.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory).absolute() / f"shardwise-{os.getuid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = os.lstat(self.path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise StoreError(f"{self.path} is a link, or belongs to another user: remove it")
            os.chmod(self.path, 0o700)
            (self.path / "runs").mkdir(exist_ok=True)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot create the directory for snapshots {self.path}: {error}"
            ) from error

    def __str__(self) -> str:
        return str(self.path)

    @property
    def info(self) -> Path:
        """The file with the agent's `AgentInfo`."""
        return self.path / "agent.json"

    @property
    def bell(self) -> Path:
        """The named pipe that wakes the agent."""
        return self.path / "agent.bell"

    @property
    def log(self) -> Path:
        """The agent's log file."""
        return self.path / "agent.log"

    def runs(self) -> list[str]:
        """Return the ids of the runs on this node."""
        return sorted(each.name for each in (self.path / "runs").iterdir())

    def run(self, run: str) -> Run:
        """Return the run with this id.

        Raises:
            StoreError: `run` is not a run id.
        """
        if not _RUN.fullmatch(run):
            raise StoreError(f"{run!r} is not a run id: expected 16 hexadecimal digits")
        return Run(self.path / "runs" / run)

    def open_lock(self, name: str) -> int:
        """Open a lock file that the processes of the node share.

        Raises:
            StoreError: the home was removed.
        """
        try:
            return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self} was removed while it is in use, with all snapshots in it: restart the "
                "training, and find out what removes files there (systemd's RemoveIPC=, batch jobs)"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the agent's lock while the block runs; yield False if another agent holds it."""
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
        """Wake the agent, if one runs."""
        with suppress(OSError):
            fd = os.open(self.bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                ring(fd)
            finally:
                os.close(fd)

    def has_agent(self) -> bool:
        """Return whether an agent runs on this node."""
        fd = self.open_lock("agent.lock")
        try:
            # Shared, so that two callers do not take each other for an agent.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


@dataclass(frozen=True)
class Run:
    """One run on this node."""

    path: Path

    @property
    def name(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def free(self) -> Path:
        """The directory of the free slots."""
        return self.path / FREE

    def steps(self) -> list[int]:
        """Return the steps that have a directory, in ascending order."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(step for name in names if (step := step_of_directory(name)) is not None)

    def step(self, step: int) -> Path:
        """Return the directory of a step's snapshot."""
        return self.path / step_directory(step)


@contextmanager
def hold(directory: Path, *, shared: bool) -> Iterator[bool]:
    """Lock a directory while the block runs, and yield whether it is locked; never wait.

    A shared lock keeps others from removing the directory.
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
    """Return a new random run id."""
    return secrets.token_hex(8)


def write_record(path: Path, record: object) -> None:
    """Write a record atomically, and replace an existing one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(record if isinstance(record, bytes) else msgspec.json.encode(record))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path, kind: type[T]) -> T | None:
    """Return a record, or None if the file does not exist.

    Raises:
        StoreError: the file is not a record of this kind.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_RECORD)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{path}: the record is damaged: {error}") from error


ABANDONED = "abandoned"
POLL = 0.002
log = logging.getLogger("shardwise.agent")


class SnapshotHeld(Exception):  # noqa: N818
    """The snapshot is locked by another process or thread; the caller can try again later."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"{place.path} is locked by another process")


@dataclass(frozen=True)
class Place:
    """The place of a snapshot on this node."""

    run: Run
    step: int

    @cached_property
    def path(self) -> Path:
        """The snapshot's directory."""
        return self.run.step(self.step)

    def temporary(self, name: str) -> Path:
        """Return the path at which a file is written before it is renamed to `name`."""
        return self.path / f".{name}"

    @contextmanager
    def hold(self, *, shared: bool) -> Iterator[bool]:
        """Lock the snapshot (see `hold`) while the block runs; yield whether it is locked."""
        with hold(self.path, shared=shared) as held:
            yield held

    def named(self, suffix: str) -> list[str]:
        """Return the sorted names of the files that end with `suffix`."""
        try:
            return sorted(name for name in os.listdir(self.path) if name.endswith(suffix))
        except FileNotFoundError:
            return []

    def pending_manifests(self) -> list[PendingManifest]:
        """Return the pending manifests of saves that this node leads: one for each save."""
        return self._pending("pending")

    def pending_copies(self) -> list[PendingManifest]:
        """Return the copies of pending manifests of saves that other nodes lead."""
        return self._pending("pending-copy")

    def _pending(self, kind: str) -> list[PendingManifest]:
        names = [records.request(kind, each) for each in records.requested(kind, self.named(""))]
        return self._read_all(names, PendingManifest)

    def staged(self) -> list[Staged]:
        """Return the records of staged files; a record without its file does not count."""
        found = self._read_all(self.named(".staged.json"), Staged)
        return [each for each in found if self.has(each.file.name)]

    def age(self) -> float:
        """Return the seconds since a rank last staged a file; 0 if none has."""
        times = []
        for name in self.named(".staged.json"):
            with suppress(FileNotFoundError):
                times.append((self.path / name).stat().st_mtime)
        return max(0.0, time.time() - max(times)) if times else 0.0

    def saves(self) -> set[str]:
        """Return the ids of the saves of which ranks have staged files."""
        return {records.save_of(name) for name in self.named(".staged.json")}

    def kept(self) -> list[Kept]:
        """Return the records of copies and parity that ranks made from their replicas."""
        return self._read_all([name for name in self.named(".json") if records.is_kept(name)], Kept)

    def ended(self, stage: str, save_id: str) -> Done | None:
        """Return how a stage has ended for the cluster, or None. A damaged record counts as a
        failure."""
        name = records.outcome(stage, save_id)
        try:
            return read_record(self.path / name, Done)
        except StoreError as error:
            self.log_damage(name, error)
            return Done(
                save_id=save_id,
                stage=stage,
                failure=f"the record of the outcome is damaged: {error}",
            )

    def _read_all(self, names: list[str], kind: type[T]) -> list[T]:
        """Return the records of these names; log damaged ones, and leave them out."""
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
        """Log a damaged record, once on this node: a marker file prevents repetition."""
        with suppress(OSError):
            self.temporary(f"{name}.damaged").touch(exist_ok=False)
            log.error("ignoring a damaged record: %s", error)

    def abandon(self) -> None:
        """Mark the snapshot as abandoned, so that nothing waits for it any longer."""
        with suppress(FileNotFoundError):
            (self.path / ABANDONED).touch()

    def refuse_abandoned(self) -> None:
        """Raise if the snapshot is abandoned.

        Raises:
            StoreError: the run was resumed from an older step.
        """
        if self.has(ABANDONED):
            raise StoreError(
                f"step {self.step} is abandoned: the run was resumed from an older step"
            )

    def has_ended(self, stage: str) -> bool:
        """Return whether a stage has ended for any save of the step."""
        return any(name.startswith(f"{stage}-all-") for name in self.named(".json"))

    def is_committed(self) -> bool:
        """Return whether the snapshot has a manifest."""
        return self.has(MANIFEST)

    def manifest_of(self, save_id: str) -> bytes:
        """Return the manifest that a save was committed with.

        Raises:
            StoreError: another save of the step has been committed since.
        """
        manifest = (self.path / MANIFEST).read_bytes()
        if decode_manifest(manifest).save_id != save_id:
            raise StoreError(f"step {self.step} was saved again meanwhile")
        return manifest

    def expect(self, name: str, deadline: float, *, failed: str = "") -> None:
        """Wait until a file of this name exists.

        Args:
            deadline: when to stop waiting, on the clock of `time.monotonic`.
            failed: the name of a `Done` record. If it exists, the file will never appear.

        Raises:
            StoreError: the file did not appear in time or will never appear, or the snapshot is
                abandoned.
        """
        while not self.has(name):
            self.refuse_abandoned()
            if failed and (why := read_record(self.path / failed, Done)) is not None:
                raise StoreError(why.failure)
            if time.monotonic() > deadline:
                raise StoreError(f"timed out waiting for {self.path / name}")
            time.sleep(POLL)

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return (self.path / name).exists()
