"""Which trainers of a node live: each holds a lock for as long as it does."""

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
    """A trainer lives, until it says goodbye or ends in whatever way.

    Children that are forked let go of the lock, so that none keeps it when this process is gone. A
    process that is this rank already, as it never said goodbye, stays so: its last presence counts.

    Raises:
        StoreError: another process is this rank of this run, on this node.
    """

    def __init__(self, run: Run, rank: int) -> None:
        self._path = _path(run, rank)
        self._mark = _this_process() + secrets.token_hex(8).encode()
        deadline = time.monotonic() + PATIENCE
        while (fd := self._lock()) is None and not self._take_over():
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process is rank {rank} of run {run.name} on this node, and has been "
                    f"for {PATIENCE:.0f} s: end it, or save to another root"
                )
            time.sleep(POLL)
        self._fd: int | None = fd
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(reference))

    def is_replaced(self) -> bool:
        """Whether this process has become this rank again since, and never left."""
        said = self._said()
        return said.startswith(_this_process()) and said != self._mark

    def refuse_replaced(self) -> None:
        """Raise if this is no longer the presence that counts.

        Raises:
            StoreError: says so.
        """
        if self.is_replaced():
            raise StoreError(
                "this process has made another Checkpointer of the same root since, whose memory "
                "this is by now: save by that one"
            )

    def end(self) -> None:
        """Say goodbye."""
        if not self.is_replaced():
            self._path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Go without a word, as if this process had ended."""
        if self.is_replaced():  # the lock is that of the next
            return
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _lock(self) -> int | None:
        """A lock of the file that lies there now; None if another has it, or the agent removes the
        run just now, as it was vacant."""
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
        except OSError:  # it is locked, or was removed meanwhile
            pass
        os.close(fd)
        return None

    def _take_over(self) -> bool:
        """Follow another presence of this process, if that has the lock."""
        if not (_is_locked(self._path) and self._said().startswith(_this_process())):
            return False
        self._path.write_bytes(self._mark)
        return True

    def _said(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def _this_process() -> bytes:
    """What no other process is called, nor one in another namespace."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}:{os.getpid()}:{started}".ljust(60).encode()


def _leave(reference: weakref.ref[RankLock]) -> None:
    presence = reference()
    if presence is not None:
        presence.leave()


def is_present(run: Run, rank: int) -> bool:
    """Whether the trainer of a rank lives on this node."""
    return _is_locked(_path(run, rank))


def has_trainers(run: Run) -> bool:
    """Whether any trainer lives on this node."""
    with suppress(FileNotFoundError):
        return any(_is_locked(path) for path in _directory(run).iterdir())
    return False


def lost_trainers(run: Run) -> list[int]:
    """The ranks that ended on this node without saying goodbye."""
    with suppress(FileNotFoundError):
        names = os.listdir(_directory(run))
        paths = [_directory(run) / name for name in names]
        return sorted(int(path.name) for path in paths if not _is_locked(path) and path.exists())
    return []


def forget_lost(run: Run) -> None:
    """Forget those who ended before the trainers of this node came, which all have their places.

    Ranks may live elsewhere by now; they would count as lost here for ever.
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
