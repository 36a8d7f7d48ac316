"""The directory of a node's snapshots: `Home` (all runs), `Run` and `SnapshotDirectory`.

<dir>/shardwise-<user>/
  agent.json  agent.lock  agent.bell  agent.log  agent.secret  agent.port  node
  mirrors/<run>.json                       what the agent mirrors
  runs/<run>/free/r00003-0.slot            a free slot
  runs/<run>/free/<id>.spare               a file that the agent reuses for copies and parity
  runs/<run>/ended/commit-all-<save>.json  outcomes of saves that are no longer in memory
  runs/<run>/step-00000010/                a snapshot
    r00003-<save>.safetensors              a data file of a rank of this node
    r00003-<save>.staged.json  …           records of the stages that were requested and reached
    manifest.json                          written when the snapshot is committed
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.root import steps_in
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    Count,
    Manifest,
    decode_manifest,
    step_directory,
)
from shardwise.kernel.store import LocalStore, open_store
from shardwise.kernel.store.local_files import open_regular
from shardwise.parts.memory import records
from shardwise.parts.memory.files import (
    LARGEST_RECORD,
    PLAIN_NAME,
    lock_directory,
    read_record,
    ring_bell,
    try_lock,
    write_record,
)
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    RingFile,
    StagedFile,
    StageOutcome,
)

AGENT_LOCK, BELL_FILE = "agent.lock", "agent.bell"
FREE_DIRECTORY, MIRRORS_DIRECTORY = "free", "mirrors"
_ROOT_RECORD = "root.json"
KNOWN_NODES_RECORD = "nodes.json"
MOST_EARLIER_NODES = 16
OUTCOMES_DIRECTORY = "ended"
ABANDONED_MARKER = "abandoned"
POLL_PAUSE = 0.002
_RUN_ID = re.compile(r"[0-9a-f]{16}")
FilesOfSteps = dict[Count, dict[Annotated[str, msgspec.Meta(pattern=PLAIN_NAME)], Count]]
"""For each step of a run, the name and size in bytes of each file."""
T = TypeVar("T")
log = logging.getLogger("shardwise.agent")


class Home:
    """The directory of one node. It is created if necessary; other users cannot read it.

    Args:
        directory: the option `Memory(dir=…)`.

    Attributes:
        path: the directory.
        info_path: the file with the agent's `AgentInfo`.
        bell_path: the named pipe that wakes the agent.
        log_path: the agent's log file.

    Raises:
        StoreError: the directory cannot be created, is a URL, or belongs to another user.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        store = open_store(directory)
        if not isinstance(store, LocalStore):
            raise StoreError(
                f"Memory(dir={str(directory)!r}): snapshots need a directory of this node, such as "
                "'/dev/shm'; to save to this URL, pass it as the root of the Checkpointer"
            )
        self.path = store.path.absolute() / f"shardwise-{os.getuid()}"
        self.info_path = self.path / "agent.json"
        self.bell_path = self.path / BELL_FILE
        self.log_path = self.path / "agent.log"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = os.lstat(self.path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise StoreError(
                    f"the directory for snapshots {self.path} is a link, or belongs to another "
                    "user: remove it, or choose another directory with Memory(dir=…)"
                )
            os.chmod(self.path, 0o700)
            (self.path / "runs").mkdir(exist_ok=True)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot create the directory for snapshots {self.path}: {error.strerror}; choose "
                "another directory with Memory(dir=…)"
            ) from error

    def __str__(self) -> str:
        return str(self.path)

    def runs(self) -> list[Run]:
        """Return the runs on this node, by id. Directories that are no runs are left out."""
        names = sorted(filter(_RUN_ID.fullmatch, _list_directories(self.path / "runs")))
        return [Run(self.path / "runs" / name) for name in names]

    def mirrored_runs(self) -> list[Run]:
        """Return the runs whose root the agent mirrors, by id."""
        names = (path.stem for path in (self.path / MIRRORS_DIRECTORY).glob("[!.]*.json"))
        return [self.run(name) for name in sorted(filter(_RUN_ID.fullmatch, names))]

    def run(self, run: str) -> Run:
        """Return the run with this id.

        Raises:
            StoreError: `run` is not a run id.
        """
        if not _RUN_ID.fullmatch(run):
            raise StoreError(
                f"{run!r} is not a run id: expected 16 hexadecimal digits, as `shardwise agent "
                "status` shows them"
            )
        return Run(self.path / "runs" / run)

    @contextmanager
    def lock(self, name: str, *, shared: bool = False, timeout: float = 0.0) -> Iterator[bool]:
        """Hold a lock of the node while the block runs; yield whether it is held.

        Args:
            name: the name of the lock file.
            timeout: seconds to wait for another process that holds the lock.

        Raises:
            StoreError: the home was removed, or the path exists and is not a regular file.
        """
        try:
            fd = open_regular(self.path / name, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self} was removed while it is in use, with all snapshots in it: restart the "
                "training, and find out what removes files there (systemd's RemoveIPC=, batch jobs)"
            ) from error
        try:
            yield any(try_lock(fd, shared=shared) for _ in Deadline(timeout).attempts())
        finally:
            os.close(fd)

    def wake(self) -> None:
        """Wake the agent, if one runs."""
        ring_bell(self.bell_path)

    def has_agent(self) -> bool:
        """Return whether an agent runs on this node."""
        # Exclusive locks of two callers would conflict.
        with self.lock(AGENT_LOCK, shared=True) as is_free:
            return not is_free


@dataclass(frozen=True)
class Run:
    """One run on this node."""

    path: Path

    @property
    def name(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def free_directory(self) -> Path:
        """The directory of the free slots."""
        return self.path / FREE_DIRECTORY

    @property
    def mirror_task_path(self) -> Path:
        """The file with the task of the agent to mirror the root. It may outlive the run."""
        return self.path.parents[1] / MIRRORS_DIRECTORY / f"{self.name}.json"

    def wake_agent(self) -> None:
        """Wake the agent of this node, if one runs."""
        ring_bell(self.path.parents[1] / BELL_FILE)

    def root(self) -> str | None:
        """Return the root of the run's checkpoints; None if it is unknown."""
        with suppress(StoreError):  # the record is damaged
            return read_record(self.path / _ROOT_RECORD, str)
        return None

    def set_root(self, root: str) -> None:
        """Record the root of the run's checkpoints."""
        write_record(self.path / _ROOT_RECORD, root)

    def known_nodes(self) -> list[AgentInfo]:
        """Return the recorded nodes of the run; an empty list without a readable record."""
        with suppress(StoreError):
            return read_record(self.path / KNOWN_NODES_RECORD, list[AgentInfo]) or []
        return []

    def record_nodes(self, nodes: Iterable[AgentInfo]) -> None:
        """Record on this node which nodes the run uses. The newest earlier nodes stay recorded.

        Ranks may return to this node after other nodes have continued the run. They find these
        nodes by this record; the records of the old snapshots do not name them.
        """
        current = {info.node: info for info in nodes}
        earlier = [info for info in self.known_nodes() if info.node not in current]
        newest = [*earlier[-MOST_EARLIER_NODES:], *current.values()]
        write_record(self.path / KNOWN_NODES_RECORD, newest)

    def steps(self) -> list[int]:
        """Return the steps that have a directory, in ascending order."""
        try:
            names = _list_directories(self.path)
        except FileNotFoundError:
            return []
        return sorted(steps_in(names))

    def snapshots(self) -> list[SnapshotDirectory]:
        """Return the directories of the snapshots, by ascending step."""
        return [SnapshotDirectory(self, step) for step in self.steps()]

    def pending_manifests(self) -> list[PendingManifest]:
        """Return the pending manifests of all snapshots, by ascending step."""
        return [each for place in self.snapshots() for each in place.pending_manifests()]

    def step_path(self, step: int) -> Path:
        """Return the directory of a step's snapshot."""
        return self.path / step_directory(step)


def _list_directories(path: Path) -> list[str]:
    """Return the names of the directories in a directory. Links are left out."""
    with os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def new_run_id() -> str:
    """Return a new random run id."""
    return secrets.token_hex(8)


class SnapshotInUse(Exception):  # noqa: N818
    """The snapshot is locked by another process or thread; the caller can try again later."""

    def __init__(self, place: SnapshotDirectory) -> None:
        super().__init__(f"{place.path} is in use: another process or thread has locked it")


@dataclass(frozen=True)
class SnapshotDirectory:
    """The directory of one snapshot on this node. It need not exist."""

    run: Run
    step: int

    @cached_property
    def path(self) -> Path:
        """The snapshot's directory."""
        return self.run.step_path(self.step)

    @property
    def manifest_path(self) -> Path:
        """The manifest, which exists when the snapshot is committed."""
        return self.path / MANIFEST

    def temporary_path(self, name: str) -> Path:
        """Return the path of a file that is being written, and will be renamed to `name`."""
        return self.path / f".{name}"

    def hold(self, *, shared: bool) -> AbstractContextManager[bool]:
        """Lock the snapshot as `lock_directory` does."""
        return lock_directory(self.path, shared=shared)

    def list_names(self, suffix: str) -> list[str]:
        """Return the names of the files that end with `suffix`, sorted."""
        try:
            return sorted(name for name in os.listdir(self.path) if name.endswith(suffix))
        except FileNotFoundError:
            return []

    def pending_manifests(self) -> list[PendingManifest]:
        """Return the pending manifests of saves, and the copies of those that other nodes lead."""
        names = records.pending_records(self.list_names(".json"))
        return self._read_all(names, PendingManifest)

    def staged_files(self) -> list[StagedFile]:
        """Return the records of staged files. Records without a file are left out."""
        found = self._read_all(self.list_names(records.STAGED_SUFFIX), StagedFile)
        return [each for each in found if self.has(each.file.name)]

    def ring_files(self) -> list[RingFile]:
        """Return the records of copies and parity that ranks made from their own replicas."""
        names = [name for name in self.list_names(".json") if records.is_ring_record(name)]
        return self._read_all(names, RingFile)

    def _read_all(self, names: list[str], record_type: type[T]) -> list[T]:
        """Return the records of these names. Damaged records are logged and left out."""
        found = []
        for name in names:
            try:
                record = read_record(self.path / name, record_type)
            except StoreError as error:
                self.log_damage(name, error)
                continue
            if record is not None:
                found.append(record)
        return found

    def log_damage(self, name: str, error: StoreError) -> None:
        """Log a damaged record once: a marker file says that it was logged."""
        with suppress(OSError):
            self.temporary_path(f"{name}.damaged").touch(exist_ok=False)
            log.error("ignored a damaged record: %s", error)

    def abandon(self) -> None:
        """Mark the snapshot as abandoned, which ends all waits for its stages."""
        with suppress(FileNotFoundError):
            (self.path / ABANDONED_MARKER).touch()

    def refuse_abandoned(self) -> None:
        """Raise if the snapshot is abandoned.

        Raises:
            StoreError: the snapshot is abandoned.
        """
        if self.has(ABANDONED_MARKER):
            raise StoreError(
                f"step {self.step} is abandoned: newer snapshots have replaced it, or run "
                f"{self.run.name} was resumed from another step, so this node discards "
                f"{self.path}; use a snapshot that was saved later"
            )

    def is_committed(self) -> bool:
        """Return whether the snapshot has a manifest, which is a regular file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISREG(self.manifest_path.lstat().st_mode)
        return False

    def read_file(self, name: str) -> bytes:
        """Return the contents of the manifest, or of a record.

        Raises:
            FileNotFoundError: there is no such file.
            StoreError: it is not a regular file, or too large.
        """
        return LocalStore(self.path).read(name, limit=LARGEST_RECORD)

    def read_manifest(self, save_id: str) -> tuple[bytes, Manifest]:
        """Return the manifest of a committed save, encoded and decoded.

        Raises:
            StoreError: another save of the step has been committed since.
        """
        encoded = self.read_file(MANIFEST)
        manifest = decode_manifest(encoded)
        if manifest.save_id != save_id:
            raise StoreError(
                f"{self.path}: step {self.step} was saved again meanwhile: save {manifest.save_id} "
                f"has replaced save {save_id}; wait for the newer save instead"
            )
        return encoded, manifest

    def wait_for(self, name: str, deadline: Deadline, *, failure_name: str = "") -> None:
        """Wait until the snapshot has a file of this name.

        Args:
            failure_name: the name of a `StageOutcome` record. If this record exists, the file will
                never appear.

        Raises:
            StoreError: the file did not appear in time or will never appear, or the snapshot is
                abandoned.
        """
        for _ in deadline.attempts(pause=POLL_PAUSE):
            if self.has(name):
                return
            self.refuse_abandoned()
            if (
                failure_name
                and (why := read_record(self.path / failure_name, StageOutcome)) is not None
            ):
                raise StoreError(why.failure)
        raise StoreError(
            f"timed out waiting for {self.path / name}: the process that writes it has ended, or "
            "is too slow; see the agent's log, or pass a larger Memory(wait=…)"
        )

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return (self.path / name).exists()


@contextmanager
def open_below(home: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open a directory below the home, through the directories `names`. Links are refused.

    Args:
        make: whether to create missing directories.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with ExitStack() as stack:
        fd = os.open(home, flags)
        stack.callback(os.close, fd)
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=fd)
            fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            stack.callback(os.close, fd)
        yield fd


def list_steps(home: Path, run: str) -> FilesOfSteps:
    """Return name and size of the regular files of each step of a run.

    Hidden files, which are being written, are left out.
    """
    found: FilesOfSteps = {}
    try:
        with open_below(home, "runs", run) as directory:
            names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for step in steps_in(names):
        with suppress(FileNotFoundError, NotADirectoryError):
            found[step] = _list_files(home, run, step_directory(step))
    return found


def _list_files(home: Path, run: str, step: str) -> dict[str, int]:
    files = {}
    with open_below(home, "runs", run, step) as directory:
        for name in os.listdir(directory):
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and re.match(PLAIN_NAME, name):
                    files[name] = status.st_size
    return files
