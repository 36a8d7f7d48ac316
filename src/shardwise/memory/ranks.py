"""The locks by which the processes of a node see which ranks are alive."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
import weakref
from contextlib import suppress
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.memory.home import Run, hold

PATIENCE = 10.0
POLL = 0.02


class RankLock:
    """The lock that a rank holds while it is alive.

    A rank ends by removing the file; if only the lock is free, the rank was lost. Forked children
    close
    the lock, so that it does not outlive this process. If the process already holds the lock of
    this
    rank, the new object takes it over.

    Raises:
        StoreError: another process holds the lock of this rank of the run on this node.
    """

    def __init__(self, run: Run, rank: int) -> None:
        self._path = _path(run, rank)
        self._mark = _this_process() + secrets.token_hex(8).encode()
        deadline = time.monotonic() + PATIENCE
        while (fd := self._lock()) is None and not self._take_over():
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process is rank {rank} of run {run.name} on this node, and has "
                    f"not ended within {PATIENCE:.0f} s: end it, or save to another root"
                )
            time.sleep(POLL)
        self._fd: int | None = fd
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(reference))

    def is_replaced(self) -> bool:
        """Return whether a newer `RankLock` of this process owns the lock."""
        content = self._content()
        return content.startswith(_this_process()) and content != self._mark

    def refuse_replaced(self) -> None:
        """Raise if a newer `RankLock` of this process has taken over the lock.

        Raises:
            StoreError: it has.
        """
        if self.is_replaced():
            raise StoreError(
                "this process has opened another Checkpointer of the same root since, which now "
                "owns the snapshots: save with that one"
            )

    def end(self) -> None:
        """Remove the file and release the lock: the rank has ended normally."""
        if not self.is_replaced():
            self._path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Release the lock and keep the file, as if this process had died."""
        if self.is_replaced():  # the newer object owns the lock
            return
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _lock(self) -> int | None:
        """Lock the file; return None if it is locked, or the agent is removing the run."""
        with suppress(FileNotFoundError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with hold(self._path.parent.parent, shared=True) as held:
                return self._lock_file() if held else None
        return None

    def _lock_file(self) -> int | None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == self._path.stat().st_ino:
                os.pwrite(fd, self._mark, 0)
                return fd
        except OSError:  # locked by another process, or just removed
            pass
        os.close(fd)
        return None

    def _take_over(self) -> bool:
        """Take over the lock from an older `RankLock` of this process; return whether it had the
        lock."""
        if not (_is_locked(self._path) and self._content().startswith(_this_process())):
            return False
        self._path.write_bytes(self._mark)
        return True

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def _this_process() -> bytes:
    """Return an identifier of this process that is unique across PID namespaces."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}:{os.getpid()}:{started}".ljust(60).encode()


def _leave(reference: weakref.ref[RankLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.leave()


def is_present(run: Run, rank: int) -> bool:
    """Return whether a rank is alive on this node."""
    return _is_locked(_path(run, rank))


def has_trainers(run: Run) -> bool:
    """Return whether any rank is alive on this node."""
    with suppress(FileNotFoundError):
        return any(_is_locked(path) for path in _directory(run).iterdir())
    return False


def lost_trainers(run: Run) -> list[int]:
    """Return the ranks that died on this node without ending normally."""
    with suppress(FileNotFoundError):
        names = os.listdir(_directory(run))
        paths = [_directory(run) / name for name in names]
        return sorted(int(path.name) for path in paths if not _is_locked(path) and path.exists())
    return []


def forget_lost(run: Run) -> None:
    """Remove the files of lost ranks, once all current ranks of this node hold their locks.

    Otherwise a rank that now runs on another node would count as lost here for ever.
    """
    for rank in lost_trainers(run):
        _path(run, rank).unlink(missing_ok=True)


def _directory(run: Run) -> Path:
    return run.path / "trainers"


def _path(run: Run, rank: int) -> Path:
    return _directory(run) / f"{rank:05d}"


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
