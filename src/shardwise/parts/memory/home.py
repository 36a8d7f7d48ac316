"""The directory of a node's snapshots: `Home` (all runs), `Run` and `SnapshotDirectory`.

<dir>/shardwise-<user>/
  agent.json  agent.lock  agent.bell  agent.log  agent.secret  agent.port  node
  roots/<run>.json                    what the agent does in the root: mirror it, remove old steps
  runs/<run>/run.json                 the root and the nodes of the run
  runs/<run>/trainers/                locks that the ranks hold while they live
  runs/<run>/free/                    free files; see `pool.py`
  runs/<run>/ended/<save>.json        the state of a save that is no longer in memory
  runs/<run>/step-00000010-<save>/    a snapshot; `records.py` describes its records
    r00003-<save>.safetensors         a data file of a rank of this node
    abandoned                         the run no longer needs the snapshot: the agent frees it
    persist                           the snapshot was for memory only, and is to be persisted now
  runs/<run>/freed-<id>/              a snapshot that is being freed
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    Count,
    Manifest,
    decode_manifest,
    step_directory,
    step_of_directory,
)
from shardwise.kernel.store import LocalStore, open_store
from shardwise.kernel.store.local_files import open_regular
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
    PENDING,
    STATE,
    AgentInfo,
    PendingManifest,
    RankPart,
    RunInfo,
    is_rank_record,
)
from shardwise.parts.memory.times import POLL_PAUSE

AGENT_LOCK, BELL_FILE = "agent.lock", "agent.bell"
FREE_DIRECTORY, TASKS_DIRECTORY = "free", "roots"
RUN_RECORD = "run.json"
MOST_EARLIER_NODES = 16
ENDED_DIRECTORY = "ended"
FREED_PREFIX = "freed-"
ABANDONED_MARKER, PERSIST_MARKER = "abandoned", "persist"
RUN_ID = re.compile(r"[0-9a-f]{16}")
SNAPSHOT_NAME = re.compile(r"(step-[0-9]+)-([0-9a-f]{16})")
SnapshotName = Annotated[str, msgspec.Meta(pattern=rf"\A{SNAPSHOT_NAME.pattern}\Z")]
FilesOfSnapshots = dict[SnapshotName, dict[Annotated[str, msgspec.Meta(pattern=PLAIN_NAME)], Count]]
"""For each snapshot of a run, by the name of its directory, the name and size of each file."""
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
        names = sorted(filter(RUN_ID.fullmatch, _list_directories(self.path / "runs")))
        return [Run(self.path / "runs" / name) for name in names]

    def runs_with_tasks(self) -> list[Run]:
        """Return the runs with a task in their root, by id."""
        names = (path.stem for path in (self.path / TASKS_DIRECTORY).glob("[!.]*.json"))
        return [self.run(name) for name in sorted(filter(RUN_ID.fullmatch, names))]

    def run(self, run: str) -> Run:
        """Return the run with this id.

        Raises:
            StoreError: `run` is not a run id.
        """
        if not RUN_ID.fullmatch(run):
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
        """The directory of the free files; see `pool.py`."""
        return self.path / FREE_DIRECTORY

    @property
    def task_path(self) -> Path:
        """The file with the agent's task in the root. It may outlive the run."""
        return self.path.parents[1] / TASKS_DIRECTORY / f"{self.name}.json"

    def info(self) -> RunInfo | None:
        """Return the root and the nodes of the run; None without a readable record."""
        with suppress(StoreError):
            return read_record(self.path / RUN_RECORD, RunInfo)
        return None

    def root(self) -> str | None:
        """Return the root of the run's checkpoints; None if it is unknown."""
        info = self.info()
        return None if info is None else info.root

    def known_nodes(self) -> list[AgentInfo]:
        """Return the recorded nodes of the run; an empty list without a readable record."""
        info = self.info()
        return [] if info is None else info.nodes

    def record_info(self, root: str, nodes: Iterable[AgentInfo]) -> None:
        """Record on this node the root of the run, and which nodes the run uses.

        The newest earlier nodes stay recorded. Ranks may return to this node after other nodes have
        continued the run. They find these nodes by this record; the records of the old snapshots do
        not name them.
        """
        current = {info.node: info for info in nodes}
        earlier = [info for info in self.known_nodes() if info.node not in current]
        newest = [*earlier[-MOST_EARLIER_NODES:], *current.values()]
        write_record(self.path / RUN_RECORD, RunInfo(root, newest))

    def snapshots(self, *, abandoned: bool = False) -> list[SnapshotDirectory]:
        """Return the directories of the snapshots, by ascending step.

        Args:
            abandoned: whether to include those that are marked as abandoned.
        """
        with suppress(FileNotFoundError):
            names = map(self.snapshot, _list_directories(self.path))
            found = [each for each in names if each and (abandoned or not each.is_abandoned())]
            return sorted(found, key=lambda each: (each.step, each.save_id))
        return []

    def snapshot(self, name: str) -> SnapshotDirectory | None:
        """Return the snapshot with a directory of this name; None if it is no such name."""
        match = SNAPSHOT_NAME.fullmatch(name)
        step = None if match is None else step_of_directory(match[1])
        return None if match is None or step is None else SnapshotDirectory(self, step, match[2])

    def refuse_other_version(self) -> None:
        """Raise if another version of shardwise has left snapshots of this run on the node.

        Raises:
            StoreError: says what to do with them.
        """
        with suppress(FileNotFoundError):
            names = _list_directories(self.path)
            steps = [each for each in names if step_of_directory(each) is not None]
            if steps:
                raise StoreError(
                    f"{self.path} has snapshots of another version of shardwise "
                    f"({', '.join(steps)}), which this version cannot read: restore them with that "
                    f"version, or remove them with `shardwise agent clear --run {self.name}`"
                )

    def freed_directories(self) -> list[Path]:
        """Return the directories of snapshots whose files are being freed."""
        with suppress(FileNotFoundError):
            names = _list_directories(self.path)
            return [self.path / name for name in names if name.startswith(FREED_PREFIX)]
        return []

    def pending_manifests(self) -> list[PendingManifest]:
        """Return the pending manifests of all snapshots, by ascending step."""
        return [each for place in self.snapshots() if (each := place.read_pending())]


def _list_directories(path: Path) -> list[str]:
    """Return the names of the directories in a directory. Links are left out."""
    with os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


@dataclass(frozen=True)
class SnapshotDirectory:
    """The directory of one snapshot on this node: the part of a save there. It need not exist."""

    run: Run
    step: int
    save_id: str

    @property
    def name(self) -> str:
        """The name of the directory."""
        return f"{step_directory(self.step)}-{self.save_id}"

    @cached_property
    def path(self) -> Path:
        """The snapshot's directory."""
        return self.run.path / self.name

    @property
    def manifest_path(self) -> Path:
        """The manifest, which exists when the snapshot is committed."""
        return self.path / MANIFEST

    @property
    def ended_path(self) -> Path:
        """The state of the save after the snapshot was freed."""
        return self.run.path / ENDED_DIRECTORY / f"{self.save_id}.json"

    def state_path(self) -> Path:
        """Return where the state of the save is, also after the snapshot was freed."""
        is_ended = not self.path.exists() and self.ended_path.exists()
        return self.ended_path if is_ended else self.path / STATE

    def temporary_path(self, name: str) -> Path:
        """Return the path of a file that is being written, and will be renamed to `name`."""
        return self.path / f".{name}"

    def hold(self, *, shared: bool) -> AbstractContextManager[bool]:
        """Lock the snapshot as `lock_directory` does."""
        return lock_directory(self.path, shared=shared)

    def list_names(self, suffix: str = "") -> list[str]:
        """Return the names of the files that end with `suffix`, sorted."""
        try:
            return sorted(name for name in os.listdir(self.path) if name.endswith(suffix))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read_pending(self) -> PendingManifest | None:
        """Return the pending manifest of the save, or this node's copy of it, if it is readable."""
        return self._read(PENDING, PendingManifest)

    def parts(self) -> list[RankPart]:
        """Return the readable records of this node's ranks."""
        names = filter(is_rank_record, self.list_names(".json"))
        return [each for name in names if (each := self._read(name, RankPart))]

    def _read(self, name: str, record_type: type[T]) -> T | None:
        """Return a record. A damaged record is logged, and counts as missing."""
        try:
            return read_record(self.path / name, record_type)
        except StoreError as error:
            self.log_damage(name, error)
            return None

    def log_damage(self, name: str, error: StoreError) -> None:
        """Log a damaged record once: a marker file says that it was logged."""
        with suppress(OSError):
            self.temporary_path(f"{name}.damaged").touch(exist_ok=False)
            log.error("ignored a damaged record: %s", error)

    def abandon(self) -> None:
        """Mark the snapshot as abandoned, which ends all waits for its stages."""
        with suppress(FileNotFoundError):
            (self.path / ABANDONED_MARKER).touch()

    def is_abandoned(self) -> bool:
        """Return whether the snapshot is marked as abandoned. Then it counts as gone."""
        return self.has(ABANDONED_MARKER)

    def refuse_abandoned(self) -> None:
        """Raise if the snapshot is abandoned.

        Raises:
            StoreError: the snapshot is abandoned.
        """
        if self.is_abandoned():
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

    def read_manifest(self) -> tuple[bytes, Manifest]:
        """Return the manifest of the committed snapshot, encoded and decoded."""
        encoded = self.read_file(MANIFEST)
        return encoded, decode_manifest(encoded)

    def wait_until(self, is_ready: Callable[[], T | None], what: str, deadline: Deadline) -> T:
        """Return the result of `is_ready` as soon as it is not None.

        Args:
            what: what is waited for, for the error.

        Raises:
            StoreError: it did not become ready in time, or the snapshot is abandoned.
        """
        for _ in deadline.attempts(pause=POLL_PAUSE):
            if (found := is_ready()) is not None:
                return found
            self.refuse_abandoned()
        raise StoreError(
            f"timed out waiting for {what} in {self.path}: the process that writes it has ended, "
            "or is too slow; see the agent's log, or pass a larger Memory(wait=…)"
        )

    def wait_for_manifest(self, deadline: Deadline) -> None:
        """Wait until the snapshot is committed on this node.

        Raises:
            StoreError: as for `wait_until`.
        """
        self.wait_until(lambda: self.is_committed() or None, MANIFEST, deadline)

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return (self.path / name).exists()


def newest_step_here(directory: str, root: str) -> int | None:
    """Return the newest committed step that this node holds of the run that saves to a root.

    Only steps in memory count. The options of a URL are ignored when roots are compared.

    Args:
        directory: the option `Memory(dir=…)`.
        root: the path or URL of the root.
    """
    place = root.partition("?")[0]
    steps = (
        snapshot.step
        for run in Home(directory).runs()
        if (run.root() or "").partition("?")[0] == place
        for snapshot in run.snapshots()
        if snapshot.is_committed()
    )
    return max(steps, default=None)


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


def list_snapshots(home: Path, run: str) -> FilesOfSnapshots:
    """Return name and size of the regular files of each snapshot of a run.

    Abandoned snapshots are left out, and hidden files, which are incomplete.
    """
    found: FilesOfSnapshots = {}
    try:
        with open_below(home, "runs", run) as directory:
            names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in names:
        if Run(home / "runs" / run).snapshot(name) is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                files = _list_files(home, run, name)
                if ABANDONED_MARKER not in files:
                    found[name] = files
    return found


def _list_files(home: Path, run: str, snapshot: str) -> dict[str, int]:
    files = {}
    with open_below(home, "runs", run, snapshot) as directory:
        for name in os.listdir(directory):
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and re.match(PLAIN_NAME, name):
                    files[name] = status.st_size
    return files
