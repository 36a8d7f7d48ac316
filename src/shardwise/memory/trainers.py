"""Which trainers of a node live: each holds a lock for as long as it does."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from shardwise.memory.home import Run


class Presence:
    """A trainer lives, until it says goodbye or ends in whatever way.

    The lock is the process's own: children that were forked do not hold it.
    """

    def __init__(self, run: Run, rank: int) -> None:
        self._path = _path(run, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def end(self) -> None:
        """Say goodbye."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def is_present(run: Run, rank: int) -> bool:
    """Whether the trainer of a rank lives on this node."""
    return _is_locked(_path(run, rank))


def lost_trainers(run: Run) -> list[int]:
    """The ranks that ended on this node without saying goodbye."""
    with suppress(FileNotFoundError):
        names = os.listdir(_directory(run))
        paths = [_directory(run) / name for name in names]
        return sorted(int(path.name) for path in paths if not _is_locked(path) and path.exists())
    return []


def _directory(run: Run) -> Path:
    return run.path / "trainers"


def _path(run: Run, rank: int) -> Path:
    return _directory(run) / f"{rank:05d}"


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
