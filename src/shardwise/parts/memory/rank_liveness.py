"""Locks that show which ranks of a run are alive on this node."""

from __future__ import annotations

import os
import re
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.local_files import open_regular
from shardwise.parts.memory.files import lock_directory, opened, regular_files, try_lock
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.times import LOCK_TIMEOUT

OWNER_SIZE = 76
NOTE_AT = 128
"""The offset of a note in the file of a lock, behind the owner."""
_RANK = re.compile(r"[0-9]{5,9}")


class RankLock:
    """The lock that a rank holds while it is alive.

    A rank that ends normally removes the lock file. If the file exists and is not locked, the rank
    was lost. Forked children close their copies of the lock, so that the lock ends with the process
    that holds it. If this process already holds the rank's lock, the new object takes it over.

    Attributes:
        has_taken_over: whether it did so.

    Raises:
        StoreError: another process holds the lock of this rank of the run on this node.
    """

    def __init__(self, run: Run, rank: int) -> None:
        self._path = _lock_file(run, rank)
        self._owner = _process_id() + secrets.token_hex(8).encode()
        self._fd: int | None = None
        for _ in Deadline(LOCK_TIMEOUT).attempts():
            self._fd = self._lock()
            self.has_taken_over = self._fd is None and self._take_over()
            if self._fd is not None or self.has_taken_over:
                break
        else:
            raise StoreError(
                f"another process is rank {rank} of run {run.name} on this node, and has "
                f"not ended within {LOCK_TIMEOUT:.0f} s: end it, or save to another root (the "
                f"lock: {self._path})"
            )
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release_in_child(reference))

    def is_replaced(self) -> bool:
        """Return whether a newer `RankLock` of this process owns the lock."""
        owner = self._read_owner()
        return owner != self._owner and owner.startswith(_process_id())

    def raise_if_replaced(self) -> None:
        """Raise if a newer `RankLock` of this process has taken over the lock.

        Raises:
            StoreError: this object no longer owns the lock.
        """
        if self.is_replaced():
            raise StoreError(
                "this process has later opened another Checkpointer of the same root, which now "
                f"owns the snapshots in {self._path.parent}: save with the newer Checkpointer"
            )

    def write_note(self, note: bytes) -> None:
        """Write a short note into the file, which `ranks_here` returns; the last one counts.

        Raises:
            OSError: the note cannot be written.
        """
        if self._fd is not None:
            os.pwrite(self._fd, note, NOTE_AT)

    def release(self) -> None:
        """Release the lock and remove its file: the rank has ended normally."""
        if not self.is_replaced():
            self._path.unlink(missing_ok=True)
        self.release_as_lost()

    def release_as_lost(self) -> None:
        """Release the lock and keep its file, as if this process had died."""
        if self.is_replaced():
            return
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _lock(self) -> int | None:
        """Lock the file; return None if it is locked, or the agent is removing the run."""
        with suppress(FileNotFoundError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with lock_directory(self._path.parent.parent, shared=True) as is_kept:
                return self._lock_file() if is_kept else None
        return None

    def _lock_file(self) -> int | None:
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # another process has just removed the file
            if try_lock(fd) and os.fstat(fd).st_ino == self._path.stat().st_ino:
                os.truncate(fd, 0)  # the note of a rank that was lost
                os.pwrite(fd, self._owner, 0)
                return fd
        os.close(fd)
        return None

    def _take_over(self) -> bool:
        """Take over the lock of an older `RankLock` of this process; return False without one."""
        if not (_is_locked(self._path) and self._read_owner().startswith(_process_id())):
            return False
        self._path.write_bytes(self._owner)
        return True

    def _read_owner(self) -> bytes:
        try:
            return self._path.read_bytes()[:OWNER_SIZE]
        except FileNotFoundError:
            return b""


def _process_id() -> bytes:
    """Return an identifier of this process that is unique across PID namespaces."""
    start_time = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}:{os.getpid()}:{start_time}".ljust(60).encode()


def _release_in_child(reference: weakref.ref[RankLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release_as_lost()


def is_rank_alive(run: Run, rank: int) -> bool:
    """Return whether a rank is alive on this node."""
    return _is_locked(_lock_file(run, rank))


def has_trainers(run: Run) -> bool:
    """Return whether any rank of a run is alive on this node."""
    return any(_is_locked(path) for path in _lock_files(run))


def lost_ranks(run: Run) -> list[int]:
    """Return the ranks that died on this node without ending normally."""
    paths = _lock_files(run)
    return sorted(int(path.name) for path in paths if not _is_locked(path) and path.exists())


def ranks_here(run: Run, note_size: int) -> list[tuple[int, bool, bytes]]:
    """Return the ranks on this node, whether each is alive, and the note that it wrote last."""
    found = []
    for path in sorted(_lock_files(run)):
        with suppress(FileNotFoundError, StoreError), opened(path) as fd:
            note = os.pread(fd, note_size, NOTE_AT)
            found.append((int(path.name), not try_lock(fd, shared=True), note))
    return found


def forget_lost_ranks(run: Run) -> None:
    """Remove the lock files of lost ranks, once all current ranks of this node hold their locks.

    Otherwise, a rank that has moved to another node would count as lost here forever.
    """
    for rank in lost_ranks(run):
        _lock_file(run, rank).unlink(missing_ok=True)


def is_training(home: Home) -> bool:
    """Return whether a rank of any run is alive on this node."""
    return any(map(has_trainers, home.runs()))


def _lock_directory(run: Run) -> Path:
    return run.path / "trainers"


def _lock_files(run: Run) -> list[Path]:
    """Return the lock files of the ranks that run or were lost on this node."""
    directory = _lock_directory(run)
    return [directory / name for name in regular_files(directory) if _RANK.fullmatch(name)]


def _lock_file(run: Run, rank: int) -> Path:
    return _lock_directory(run) / f"{rank:05d}"


def _is_locked(path: Path) -> bool:
    with suppress(FileNotFoundError, StoreError), opened(path) as fd:
        return not try_lock(fd, shared=True)
    return False
